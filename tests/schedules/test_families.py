"""Each family against its picture and its closed forms."""

from __future__ import annotations

import pytest

from pipeloom.checks.schedules import check
from pipeloom.ir.action import Action, F
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import parse_rows
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules.registry import build, in_flight, names, register
from pipeloom.simulator.simulate import simulate
from pipeloom.simulator.summary import summarise

DIAMOND = dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
TWO_ENCODERS = dag(5, [(0, 1), (1, 3), (2, 3), (3, 4)])
SKIP = dag(4, [(0, 1), (1, 2), (2, 3), (0, 3)])

PICTURES: list[tuple[str, StageGraph, tuple[int, ...], int, str]] = [
    (
        "forward_only",
        chain(2),
        (0, 1),
        3,
        """\
0F0 0F1 0F2
1F0 1F1 1F2""",
    ),
    (
        "gpipe",
        chain(3),
        (0, 1, 2),
        3,
        """\
0F0 0F1 0F2 0B0 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2
2F0 2F1 2F2 2B0 2B1 2B2""",
    ),
    (
        "1f1b",
        chain(3),
        (0, 1, 2),
        4,
        """\
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    ),
    ("1f1b", chain(1), (0,), 2, "0F0 0B0 0F1 0B1"),
    ("gpipe", chain(1), (0,), 2, "0F0 0F1 0B0 0B1"),
    # Fewer micro-batches than ranks.
    (
        "1f1b",
        chain(4),
        (0, 1, 2, 3),
        2,
        """\
0F0 0F1 0B0 0B1
1F0 1F1 1B0 1B1
2F0 2F1 2B0 2B1
3F0 3B0 3F1 3B1""",
    ),
    # Both branches of a diamond are equally far from the loss, so both run one ahead.
    (
        "1f1b",
        DIAMOND,
        (0, 1, 2, 3),
        4,
        """\
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3""",
    ),
    # The short encoder (stage 2) need not run as far ahead as the long one (stages 0 and 1).
    (
        "1f1b",
        TWO_ENCODERS,
        (0, 1, 2, 3, 4),
        4,
        """\
0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
2F0 2F1 2F2 2B0 2F3 2B1 2B2 2B3
3F0 3F1 3B0 3F2 3B1 3F3 3B2 3B3
4F0 4B0 4F1 4B1 4F2 4B2 4F3 4B3""",
    ),
    # A skip connection changes nothing: the longest path counts.
    (
        "1f1b",
        SKIP,
        (0, 1, 2, 3),
        4,
        """\
0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3""",
    ),
    # Neighbours on one rank act as one stage.
    (
        "1f1b",
        chain(4),
        (0, 0, 1, 1),
        3,
        """\
0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2
2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2""",
    ),
    (
        "gpipe",
        chain(4),
        (0, 0, 1, 1),
        2,
        """\
0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1""",
    ),
    # Looped and V placements.
    (
        "gpipe",
        chain(4),
        (0, 1, 0, 1),
        2,
        """\
0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1""",
    ),
    (
        "1f1b",
        chain(4),
        (0, 1, 1, 0),
        3,
        """\
0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2
1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2""",
    ),
]


@pytest.mark.parametrize(("name", "stages", "placement", "microbatches", "picture"), PICTURES)
def test_pictures(
    name: str, stages: StageGraph, placement: tuple[int, ...], microbatches: int, picture: str
) -> None:
    made = build(name, stages, placement, microbatches)
    assert str(made) == picture
    assert parse_rows(tuple(str(made).splitlines())) == made.rows


def test_split_backward_puts_each_w_behind_its_i() -> None:
    made = build("1f1b", chain(2), (0, 1), 2, split_backward=True)
    assert (
        str(made)
        == """\
0F0 0F1 0I0 0W0 0I1 0W1
1F0 1I0 1W0 1F1 1I1 1W1"""
    )
    assert str(build("forward_only", chain(2), (0, 1), 1, split_backward=True)) == "0F0\n1F0"


def cluster(ranks: int) -> Cluster:
    free = Link(bandwidth_bytes_per_s=float("inf"))
    return Cluster(devices=(Device(name="any", memory_bytes=1),) * ranks, within_node=free)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 7, 16, 32])
def test_idle_share_is_the_published_one_exactly(name: str, split: bool, p: int, m: int) -> None:
    made = build(name, chain(p), tuple(range(p)), m, split_backward=split)
    costs = equal_costs(p, forward_s=1.0, input_grad_s=1.5, weight_grad_s=0.5)
    timeline = simulate(lower(made, chain(p)), chain(p), costs, cluster(p))
    if split:
        # Gradients leave before W, so each of the p - 1 ranks of the drain waits for I only.
        assert timeline.step_s == 3.0 * m + 2.5 * (p - 1)
    else:
        assert timeline.step_s == 3.0 * (m + p - 1)
        assert summarise(timeline).bubble == (p - 1) / (m + p - 1)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 7, 16])
def test_micro_batches_in_flight(p: int, m: int) -> None:
    placement = tuple(range(p))
    one = build("1f1b", chain(p), placement, m)
    assert in_flight(one) == tuple(min(p - s, m) for s in range(p))
    assert in_flight(build("gpipe", chain(p), placement, m)) == (m,) * p
    assert in_flight(build("forward_only", chain(p), placement, m)) == (0,) * p


def test_shallow_graphs_hold_fewer_micro_batches_than_chains() -> None:
    made = build("1f1b", DIAMOND, (0, 1, 2, 3), 8)
    assert in_flight(made) == (3, 2, 2, 1)


@pytest.mark.parametrize(
    "lost", [dag(3, [(0, 1), (0, 2)], loss_stage=1), dag(2, [(0, 1)], loss_stage=0)], ids=["beside", "behind"]
)
def test_1f1b_has_a_place_for_a_stage_that_the_loss_does_not_need(lost: StageGraph) -> None:
    made = build("1f1b", lost, tuple(range(len(lost.stages))), 4)
    check(made, lost)
    assert in_flight(made)[0] == 2 and in_flight(made)[-1] == 1


@pytest.mark.parametrize(
    ("name", "placement", "microbatches", "message"),
    [
        ("1fb1", (0, 1), 2, "no schedule is named '1fb1'\nhint: did you mean 1f1b? the schedules are"),
        ("zigzag", (0, 1), 2, "no schedule is named 'zigzag'\nhint: the schedules are forward_only, gpipe"),
        ("1f1b", (0, 1), 0, "0 micro-batches\nhint: use at least 1"),
        ("1f1b", (0, 1, 2), 1, "the placement names 3 stages, the stage graph has 2\nhint: give one rank"),
        ("1f1b", (), 1, "the placement names 0 stages, the stage graph has 2\nhint: give one rank"),
        ("1f1b", (0, 2), 1, "rank 1 has no stage\nhint: number the ranks from 0 without gaps"),
        ("gpipe", (0, -1), 1, "a stage is placed on rank -1\nhint: number the ranks from 0"),
    ],
)
def test_build_refuses(name: str, placement: tuple[int, ...], microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(name, chain(2), placement, microbatches)
    assert str(caught.value).startswith(message)


def test_names_may_be_written_as_people_write_them() -> None:
    assert build("GPipe", chain(1), (0,), 1).name == "gpipe"
    assert build("forward-only", chain(1), (0,), 1).name == "forward_only"


def test_a_registered_family_is_built_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeloom.schedules import registry

    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    register("mine", lambda stages, placement, m: [[Action(0, F, i) for i in range(m)]])
    assert "mine" in names()
    assert str(build("mine", chain(1), (0,), 2)) == "0F0 0F1"
    with pytest.raises(ScheduleError, match="a schedule named 'mine' exists already"):
        register("Mine", registry.FAMILIES["gpipe"])
    register("broken", lambda stages, placement, m: [[Action(0, F, 0)] * 2])
    with pytest.raises(ScheduleError, match="rank 0 runs 0F0 twice"):
        build("broken", chain(1), (0,), 1)
