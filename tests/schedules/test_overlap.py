"""Pairs: two actions of a rank that run as one unit, such as F of one micro-batch with B of another."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import figures
from hypothesis import given, strategies as st
from small import alike, built, by_hand, simulated

from pipeloom.checks.schedules import check
from pipeloom.ir.action import Action, B, F, Kind, schedule_kinds
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import ConfigError, ScheduleError
from pipeloom.ir.schedule import Pair, Schedule, parse_pairs, parse_program, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.formats import parse_schedule, schedule_text
from pipeloom.schedules.language import shape
from pipeloom.schedules.language.patterns import phases
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.choose import make
from pipeloom.schedules.registry import shape_of


def f_with_b(a: Action, b: Action) -> bool:
    return (a.kind, b.kind) == (F, B)


PAIRED = ("0F0 0F1 0F2&0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")

ACTIONS = st.builds(
    Action,
    stage=st.integers(0, 999),
    kind=st.sampled_from(sorted(schedule_kinds())).map(Kind),
    microbatch=st.integers(0, 99999),
)


def pairs_in(draw: st.DrawFn, rows: Iterable[Sequence[Action]]) -> tuple[Pair, ...]:
    """Any neighbours of a row, no action in two pairs."""
    pairs: list[Pair] = []
    for row in rows:
        for pair in pairwise(row):
            if not (pairs and pairs[-1][1] == pair[0]) and draw(st.integers(0, 2)) == 0:
                pairs.append(pair)
    return tuple(pairs)


@given(rows=st.lists(st.lists(ACTIONS, max_size=8), min_size=1, max_size=4), data=st.data())
def test_what_prints_also_parses(rows: list[list[Action]], data: st.DataObject) -> None:
    """Rows of any registered kinds, with pairs anywhere: text and back gives the same."""
    seen: set[Action] = set()
    unique = tuple(tuple(a for a in row if not (a in seen or seen.add(a))) for row in rows)  # type: ignore[func-returns-value]
    pairs = pairs_in(data.draw, unique)
    made = Schedule(name="", microbatches=1, placement=(0,), rows=unique, pairs=pairs)
    lines = tuple(str(made).split("\n"))
    assert parse_rows(lines) == made.rows and parse_pairs(lines) == made.pairs


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("0F2&", "the action is empty"),
        ("0F2&0B0&0W0", "two actions: write 2F5&1B3"),
        ("0F2&0b0", "write 0B0"),
        ("(0F2;0B0)OVERLAP_F_B", "write stage, kind, micro-batch"),
    ],
)
def test_wrong_text_of_a_pair(word: str, hint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_rows((word,))
    assert hint in str(caught.value.hint)


def test_messages_of_a_pair_stand_around_it() -> None:
    program = lower(by_hand(*PAIRED), chain(2))
    assert "0RECV_B0<1 0F2&0B0 0SEND_F2>1" in str(program)
    middle = by_hand("0F0 0F1 0B0 0B1", "1F0 1F1&1B0 1B1", "2F0 2B0 2F1 2B1")
    line = str(lower(middle, chain(3))).splitlines()[1]
    assert "1RECV_F1<0 1RECV_B0<2 1F1&1B0 1SEND_F1>2 1SEND_B0>0" in line
    assert parse_program(3, (0, 1), tuple(str(program).splitlines())) == program


@pytest.mark.parametrize(
    ("how", "seconds"), [({}, 3.0), ({"pair_factor": 0.8}, 2.4), ({"pair_s": {"F&B": 2.0}}, 2.0)]
)
def test_a_pair_takes_its_joint_time_and_is_drawn_as_two_blocks(how: dict[str, Any], seconds: float) -> None:
    timeline = simulated(by_hand(*PAIRED), (replace(equal_costs(1)[0], **how),) * 2)
    blocks = {e.action: e for e in timeline.events}
    assert blocks["0F2"].start_s == 4  # not 2: the pair waits for what its B needs
    assert blocks["0F2"].end_s == blocks["0B0"].start_s == pytest.approx(4 + seconds / 3)
    assert blocks["0B0"].end_s == pytest.approx(4 + seconds)


def test_times_of_pairs_in_costs() -> None:
    cost = replace(equal_costs(1)[0], pair_s={"F&B": 2.0})
    with pytest.raises(ConfigError, match=r"pair_s\[F&B\] = -1"):
        replace(cost, pair_s={"F&B": -1.0})


def in_rows(s: Shape) -> Recipe:
    ahead = phases(s, warm_up=lambda rank: 2 * (s.ranks - 1 - rank), repeat="FB", kinds="FB")
    return Recipe(rows=ahead, together=f_with_b)


def greedy(s: Shape) -> Recipe:
    first, most = lambda a: (a.kind == F, a.microbatch), lambda rank: 2 * (s.ranks - rank)
    return Recipe(priority=first, in_flight=most, together=f_with_b)


def by_clock(s: Shape) -> Recipe:
    clock = shape.path_clock(s, kinds="FB")
    return Recipe(clock=clock, memory=s.ranks, together=lambda a, b: f_with_b(b, a))


@pytest.mark.parametrize("transfer_s", [0.0, 0.25])
@pytest.mark.parametrize("order", [in_rows, greedy, by_clock])
def test_the_list_scheduler_and_the_simulator_agree(order, transfer_s) -> None:
    cost = replace(equal_costs(1)[0], pair_factor=0.75)
    s = replace(shape_of(4, microbatches=12), costs=(cost,) * 4, transfer_s=lambda source, target: transfer_s)
    made = make(s, order(s))
    schedule = Schedule(name="", microbatches=12, placement=s.placement, rows=made.rows, pairs=made.pairs)
    check(schedule, s.stages)
    step_s = simulated(schedule, s.costs, s.stages, alike(4, latency_s=transfer_s)).step_s
    assert len(made.pairs) > 8 and step_s == pytest.approx(made.step_s)
    assert not make(s, replace(order(s), together=None)).pairs


@pytest.mark.parametrize(("factor", "step_s"), [("1", 12), ("2", 15)])
def test_the_command_line_says_what_a_pair_takes(factor: str, step_s: float, tmp_path: Path) -> None:
    file = tmp_path / "paired.txt"
    file.write_text("\n".join(PAIRED))
    assert figures("schedule", "check", file, "--pair-factor", factor)["step_s"] == step_s


def test_pairs_in_files_of_torch() -> None:
    made = by_hand(*PAIRED)
    read = parse_schedule(schedule_text(made))
    assert "(0F2;0B0)OVERLAP_F_B" in schedule_text(made)
    assert (read.rows, read.pairs) == (made.rows, made.pairs)
    with pytest.raises(ScheduleError, match="no pair 0B0&0F2"):
        schedule_text(by_hand("0F0 0F1 0B0&0F2 0B1 0B2", PAIRED[1]))


def test_a_split_backward_would_tear_pairs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    registry.register("paired", registry.Entry(recipe=in_rows))
    assert built("paired", 3, 8).pairs
    with pytest.raises(ScheduleError, match="tear apart"):
        built("paired", 3, 8, split_backward=True)


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ("0F0&0B0", "0B0 needs 0F0"),
        ("0F0&0F2", "rank 0 does not run 0F2 right after 0F0"),
        ("0F1&1B0", "rank 0 does not run 1B0 right after 0F1"),
        ("0F0&0F7", "no rank runs 0F7"),
        ("0B1&0F2 0F2&0B2", "0F2 is in two pairs"),
    ],
)
def test_wrong_pairs_are_refused(pairs: str, problem: str) -> None:
    made = by_hand("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    with pytest.raises(ScheduleError, match=problem):
        check(replace(made, pairs=parse_pairs((pairs,))), chain(2))
