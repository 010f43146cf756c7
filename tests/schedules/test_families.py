"""Each family against its picture and its closed forms; names, placements and options that are refused."""

from collections.abc import Callable

import pytest
from refusals import refused
from small import built, simulated

from pipeloom.checks.schedules import check
from pipeloom.ir.action import Action, F
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.schedules import registry
from pipeloom.schedules.language.names import ALIASES
from pipeloom.schedules.registry import Entry, build, in_flight, names, register
from pipeloom.simulator.summary import summarise

PICTURES = {
    "forward_only": (chain(2), (0, 1), "0F0 0F1 0F2 | 1F0 1F1 1F2"),
    "gpipe, neighbours on one rank": (
        chain(4),
        (0, 0, 1, 1),
        "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1 | 2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1",
    ),
    "gpipe in a loop": (
        chain(4),
        (0, 1, 0, 1),
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 | 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ),
    "1f1b": (
        chain(3),
        (0, 1, 2),
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ),
    "1f1b, a short encoder (stage 2) that need not run as far ahead as the long one (0 and 1)": (
        dag(5, [(0, 1), (1, 3), (2, 3), (3, 4)]),
        (0, 1, 2, 3, 4),
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 | 1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3 | "
        "2F0 2F1 2F2 2B0 2F3 2B1 2B2 2B3 | 3F0 3F1 3B0 3F2 3B1 3F3 3B2 3B3 | 4F0 4B0 4F1 4B1 4F2 4B2 4F3 4B3",
    ),
    "1f1b, neighbours on one rank that act as one stage": (
        chain(4),
        (0, 0, 1, 1),
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2 | 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2",
    ),
    "1f1b in a V": (
        chain(4),
        (0, 1, 1, 0),
        "0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2 | 1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2",
    ),
    "1f1b, split: each W behind its I": (
        chain(2),
        (0, 1),
        "0F0 0F1 0I0 0W0 0I1 0W1 | 1F0 1I0 1W0 1F1 1I1 1W1",
    ),
}
"""Family and what is drawn -> stages, placement, rows."""


@pytest.mark.parametrize("what", PICTURES)
def test_pictures(what: str) -> None:
    stages, placement, picture = PICTURES[what]
    rows = parse_rows(tuple(picture.split(" | ")))
    name = what.replace(",", "").split()[0]
    split = "split" in what
    made = build(name, stages, placement, 1 + max(a.microbatch for a in rows[0]), split_backward=split)
    assert made.rows == rows and str(made) == picture.replace(" | ", "\n")


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 7, 16])
def test_idle_share_is_the_published_one_exactly_and_so_is_what_is_held(name: str, p: int, m: int) -> None:
    made, split = (build(name, chain(p), tuple(range(p)), m, split_backward=s) for s in (False, True))
    costs = equal_costs(p, forward_s=1.0, input_grad_s=1.5, weight_grad_s=0.5)
    timeline = simulated(made, costs)
    assert timeline.step_s == 3.0 * (m + p - 1)
    assert summarise(timeline).bubble == (p - 1) / (m + p - 1)
    # Gradients leave before W, so each of the p - 1 ranks of the drain waits for I only.
    assert simulated(split, costs).step_s == 3.0 * m + 2.5 * (p - 1)
    assert in_flight(made) == tuple(m if name == "gpipe" else min(p - s, m) for s in range(p))
    assert in_flight(build("forward_only", chain(p), tuple(range(p)), m)) == (0,) * p


@pytest.mark.parametrize(
    "lost", [dag(3, [(0, 1), (0, 2)], loss_stage=1), dag(2, [(0, 1)], loss_stage=0)], ids=["beside", "behind"]
)
def test_1f1b_has_a_place_for_a_stage_that_the_loss_does_not_need(lost: StageGraph) -> None:
    made = build("1f1b", lost, tuple(range(len(lost.stages))), 4)
    check(made, lost)
    assert in_flight(made)[0] == 2 and in_flight(made)[-1] == 1


def made(name: str, placement: tuple[int, ...] = (0, 0), microbatches: int = 4) -> Schedule:
    return build(name, chain(2), placement, microbatches)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: made("1fb1"), "did you mean 1f1b"),
        (lambda: made("zigzag"), "the schedules are"),
        (lambda: made("1f1b", (0, 1), 0), "0 micro-batches"),
        (lambda: made("1f1b", (0, 1, 2)), "3 stages"),
        (lambda: made("1f1b", ()), "0 stages"),
        (lambda: made("1f1b", (0, 2)), "rank 1 has no stage"),
        (lambda: made("gpipe", (0, -1)), "rank -1"),
        (lambda: made("1f1b:memory=2"), "no option 'memory'"),
        (lambda: made("zb_v:groups=2"), "no option 'groups'"),
        (lambda: made("gis_g:grop=2"), "did you mean group?"),
        (lambda: made("zb_v:memory"), "cannot read option 'memory'"),
        (lambda: registry.default_placement("zb_h1:v=2", 2), "one stage on each rank"),
        (lambda: registry.default_placement("dualpipe:v=2", 2), "`-v`"),
        (lambda: registry.default_placement("interleaved:v=0.5", 2), "0.5 stages per rank"),
        (lambda: registry.with_chunks("interleaved:v=3", 4), "4 stages per rank"),
        (lambda: registry.with_chunks("1f1b", 2), "one stage on each rank"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], word: str) -> None:
    assert word in refused(ScheduleError, call)


def test_a_registered_family_is_built_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    register("mine", Entry(rows=lambda s: [[Action(0, F, i) for i in range(s.microbatches)]]))
    assert "mine" in names()
    assert str(build("mine", chain(1), (0,), 2)) == "0F0 0F1"
    with pytest.raises(ScheduleError, match="exists already"):
        register("Mine", registry.FAMILIES["gpipe"])
    register("broken", Entry(rows=lambda s: [[Action(0, F, 0)] * 2]))
    with pytest.raises(ScheduleError, match="twice"):
        build("broken", chain(1), (0,), 1)


def test_an_alias_is_the_schedule_and_hides_no_other() -> None:
    for name, others in ALIASES.items():
        for alias in others:
            assert registry.entry(alias) is registry.entry(alias.upper()) is registry.entry(name)
            assert alias.lower() not in registry.names()


def test_a_schedule_is_built_under_its_own_name() -> None:
    made = built("Interleaved:v=3", 2, 4)
    assert made.name == "interleaved_1f1b:v=3" and made.stages == 6
    assert build("forward-only", chain(1), (0,), 1).name == "forward_only"
    assert registry.with_chunks("interleaved:v=3", 3) == "interleaved:v=3"
