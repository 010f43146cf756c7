"""Pairs: two actions of a rank that run as one unit, such as F of one micro-batch with B of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from pipeloom.checks.schedules import check
from pipeloom.cli import main
from pipeloom.ir.action import Action, B, F, Kind, schedule_kinds
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import DeadlockError, ScheduleError
from pipeloom.ir.schedule import Pair, Schedule, parse_pairs, parse_program, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import library_entry, placements
from pipeloom.schedules.formats.csv import parse_schedule, schedule_text
from pipeloom.schedules.language import shape
from pipeloom.schedules.language.patterns import phases
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape
from pipeloom.schedules.list_scheduler.choose_recipe import make
from pipeloom.schedules.registry import build, default_placement, register, shape_of
from pipeloom.simulator.simulate import simulate


def by_hand(*lines: str) -> Schedule:
    rows = parse_rows(lines)
    count = 1 + max(a.microbatch for row in rows for a in row)
    return Schedule(
        name="hand",
        microbatches=count,
        placement=tuple(range(len(rows))),
        rows=rows,
        pairs=parse_pairs(lines),
    )


def simulated(made: Schedule, costs: tuple[StageCost, ...], transfer_s: float = 0.0) -> Timeline:
    stages = chain(made.stages)
    link = Link(bandwidth_bytes_per_s=float("inf"), latency_s=transfer_s)
    cluster = Cluster(devices=(Device(name="any", memory_bytes=1),) * made.ranks, within_node=link)
    return simulate(lower(made, stages), stages, costs, cluster)


def f_with_b(a: Action, b: Action) -> bool:
    return (a.kind, b.kind) == (F, B)


PAIRED = ("0F0 0F1 0F2&0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")


def test_text_of_a_pair() -> None:
    made = by_hand(*PAIRED)
    assert made.pairs == ((Action(0, F, 2), Action(0, B, 0)),)
    assert str(made).splitlines() == list(PAIRED)
    check(made, chain(2))


ACTIONS = st.builds(
    Action,
    stage=st.integers(0, 999),
    kind=st.sampled_from(sorted(schedule_kinds())).map(Kind),
    microbatch=st.integers(0, 99999),
)


@settings(deadline=None)
@given(rows=st.lists(st.lists(ACTIONS, max_size=8), min_size=1, max_size=4), data=st.data())
def test_what_prints_also_parses(rows: list[list[Action]], data: st.DataObject) -> None:
    """Rows of any registered kinds, with pairs anywhere: text and back gives the same."""
    seen: set[Action] = set()
    rows = [[a for a in row if not (a in seen or seen.add(a))] for row in rows]  # type: ignore[func-returns-value]
    pairs: list[Pair] = []
    for row in rows:
        at = 0
        while at + 1 < len(row):
            if data.draw(st.booleans()):
                pairs.append((row[at], row[at + 1]))
                at += 1
            at += 1
    made = Schedule(name="", microbatches=1, placement=(0,), rows=tuple(map(tuple, rows)), pairs=tuple(pairs))
    lines = tuple(str(made).split("\n"))
    assert parse_rows(lines) == made.rows and parse_pairs(lines) == made.pairs


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("0F2&", "the action is empty"),
        ("&0B0", "the action is empty"),
        ("0F2&0B0&0W0", "a pair joins two actions: write 2F5&1B3"),
        ("0F2&&0B0", "a pair joins two actions"),
        ("0F2&0b0", "write 0B0"),
        ("0F2+0B0", "write 0F2 and nothing behind it"),
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
    lines = tuple(str(program).splitlines())
    assert parse_program(3, (0, 1), lines) == program


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("0F0", "0B0", "rank 0 runs 0F0&0B0 as a pair, but 0B0 needs 0F0"),
        ("0F0", "0F2", "rank 0 does not run 0F2 right after 0F0, though 0F0&0F2 is a pair"),
        ("0F1", "1B0", "rank 0 does not run 1B0 right after 0F1"),
        ("0F0", "0F7", "no rank runs 0F7 of the pair 0F0&0F7"),
    ],
)
def test_wrong_pairs_are_refused(first: str, second: str, problem: str) -> None:
    lines = ("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    (pair,) = parse_pairs((f"{first}&{second}",))
    with pytest.raises(ScheduleError, match=problem):
        check(replace(by_hand(*lines), pairs=(pair,)), chain(2))


def test_an_action_in_two_pairs_is_refused() -> None:
    pairs = parse_pairs(("0F1&0F2 0F2&0B0",))
    with pytest.raises(ScheduleError, match="0F2 is in two pairs"):
        check(replace(by_hand("0F0 0F1 0F2 0B0 0B1 0B2"), pairs=pairs), chain(1))


def test_what_both_wait_for_must_come() -> None:
    """Alone 0F1 could run before 0B0; as a pair it waits for 1B0, and rank 1 wants 1F1 first."""
    apart = by_hand("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    check(apart, chain(2))
    with pytest.raises(DeadlockError, match="rank 0 at 0F1 needs 1B0; rank 1 at 1F1 needs 0F1"):
        check(replace(apart, pairs=parse_pairs(("0F1&0B0",))), chain(2))


def test_a_pair_takes_its_joint_time_and_is_drawn_as_two_blocks() -> None:
    made = by_hand(*PAIRED)
    cost = equal_costs(1)[0]
    for joint, seconds in (
        (cost, 3.0),
        (replace(cost, pair_factor=0.8), 2.4),
        (replace(cost, pair_s={"F&B": 2.0}), 2.0),
    ):
        timeline = simulated(made, (joint,) * 2)
        blocks = {e.action: e for e in timeline.events}
        assert blocks["0F2"].start_s == 4  # not 2: the pair waits for what its B needs
        assert blocks["0F2"].end_s == blocks["0B0"].start_s == pytest.approx(4 + seconds / 3)
        assert blocks["0B0"].end_s == pytest.approx(4 + seconds)


def test_times_of_pairs_in_costs() -> None:
    cost = replace(equal_costs(1)[0], pair_s={"F&B": 2.0})
    assert cost.slowed(2).pair_s == {"F&B": 4.0}
    with pytest.raises(Exception, match=r"pair_s\[F&B\] = -1"):
        replace(cost, pair_s={"F&B": -1.0})


def recipes() -> dict[str, Callable[[Shape], Recipe]]:
    def rows(s: Shape) -> Recipe:
        ahead = phases(s, warm_up=lambda rank: 2 * (s.ranks - 1 - rank), repeat="FB", kinds="FB")
        return Recipe(rows=ahead, together=f_with_b)

    def greedy(s: Shape) -> Recipe:
        return Recipe(
            priority=lambda a: (a.kind == F, a.microbatch),
            in_flight=lambda rank: 2 * (s.ranks - rank),
            together=f_with_b,
        )

    def clock(s: Shape) -> Recipe:
        return Recipe(
            clock=shape.path_clock(s, kinds="FB"), memory=s.ranks, together=lambda a, b: f_with_b(b, a)
        )

    return {"rows": rows, "greedy": greedy, "clock": clock}


@pytest.mark.parametrize("transfer_s", [0.0, 0.25])
@pytest.mark.parametrize("order", recipes())
def test_the_list_scheduler_and_the_simulator_agree(order: str, transfer_s: float) -> None:
    cost = replace(equal_costs(1)[0], pair_factor=0.75)
    s = replace(shape_of(4, microbatches=12), costs=(cost,) * 4, transfer_s=lambda source, target: transfer_s)
    made = make(s, recipes()[order](s)).outcome
    schedule = Schedule(name="", microbatches=12, placement=s.placement, rows=made.rows, pairs=made.pairs)
    assert len(made.pairs) > 8
    check(schedule, s.stages)
    assert simulated(schedule, s.costs, transfer_s).step_s == pytest.approx(made.step_s)
    apart = make(s, replace(recipes()[order](s), together=None)).outcome
    assert not apart.pairs


def test_dualpipe_with_pairs_is_faster_where_they_gain() -> None:
    """F and B of the two chunks of a V as one unit, at 80 % of the time of both."""
    cost = replace(equal_costs(1, forward_s=0.5, input_grad_s=0.5, weight_grad_s=0.5)[0], pair_factor=0.8)
    s = replace(
        shape_of(4, microbatches=16), stages=chain(8), placement=placements.wave(4), costs=(cost,) * 8
    )

    def recipe(together: Callable[[Action, Action], bool] | None) -> Recipe:
        return Recipe(clock=shape.path_clock(s, kinds="FB"), memory=s.ranks, together=together)

    def other_chunk(a: Action, b: Action) -> bool:
        return a.kind == F and b.kind == B and s.chunk[a.stage] != s.chunk[b.stage]

    assert make(s, recipe(other_chunk)).outcome.step_s < make(s, recipe(None)).outcome.step_s


def test_the_command_line_says_what_a_pair_takes(tmp_path: Path) -> None:
    file = tmp_path / "paired.txt"
    file.write_text("\n".join(PAIRED))
    steps = []
    for factor in ("1", "2"):
        words = ["schedule", "check", str(file), "--pair-factor", factor, "--json"]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        steps.append(json.loads(result.output)["step_s"])
    assert steps == [12, 15]


def test_pairs_in_files_of_torch() -> None:
    made = by_hand(*PAIRED)
    text = schedule_text(made)
    assert "(0F2;0B0)OVERLAP_F_B" in text
    read = parse_schedule(text)
    assert (read.rows, read.pairs) == (made.rows, made.pairs)
    with pytest.raises(ScheduleError, match="torch's format has no pair 0B0&0F2"):
        schedule_text(by_hand("0F0 0F1 0B0&0F2 0B1 0B2", PAIRED[1]))


def test_a_split_backward_would_tear_pairs_apart() -> None:
    entry = library_entry.Entry(recipe=recipes()["rows"])
    register("test_paired", entry)
    try:
        made = build("test_paired", chain(3), (0, 1, 2), 8)
        assert made.pairs
        with pytest.raises(ScheduleError, match="a split backward would tear apart"):
            build("test_paired", chain(3), (0, 1, 2), 8, split_backward=True)
    finally:
        from pipeloom.schedules import registry

        del registry.FAMILIES["test_paired"]


@settings(deadline=None)
@given(data=st.data())
def test_random_pairs_are_refused_or_run(data: st.DataObject) -> None:
    """Any neighbours of a good schedule as pairs: a rule refuses them, or the simulator comes to its end."""
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "eager_1f1b", "zb_v", "interleaved_1f1b"]))
    stages, placement = default_placement(name, data.draw(st.integers(2, 3)))
    made = build(name, stages, placement, data.draw(st.integers(1, 5)))
    pairs: list[Pair] = []
    for row in made.rows:
        at = 0
        while at + 1 < len(row):
            if data.draw(st.integers(0, 3)) == 0:
                pairs.append((row[at], row[at + 1]))
                at += 1
            at += 1
    paired = replace(made, pairs=tuple(pairs))
    costs = equal_costs(len(placement))
    try:
        check(paired, stages)
    except ScheduleError as error:
        assert "pair" in error.message or isinstance(error, DeadlockError)
        return
    apart, together = (simulated(m, costs).step_s for m in (made, paired))
    assert together >= apart - 1e-9
