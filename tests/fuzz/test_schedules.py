"""Random edits of schedules and programs: accepted exactly if they can run, refused by the right rule."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from edits import Case, cases, dag_cases, edited_programs, edited_schedules
from hypothesis import HealthCheck, event, given, strategies as st
from shared_links import treated
from slow_check import broken_program_rule, broken_rule, computes, makes, rule_of, stuck, wants
from small import alike, whole_costs
from trials import examples

from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.action import parse_action
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering.passes import lower
from pipeloom.simulator.simulate import simulate

CALM = [HealthCheck.data_too_large, HealthCheck.filter_too_much]
SOME = examples(40, 1_500, suppress_health_check=CALM)


def run_through(program: Program, stages: StageGraph, seed: int) -> None:
    """Simulate with uneven times; every action of the program ends, one after the other on its rank, and
    nothing stays held but what is held the whole step."""
    costs, ranks = whole_costs(len(stages.stages), seed), len(program.rows)
    timeline = simulate(program, stages, costs, alike(ranks, 4.0), receive_ahead=1 + seed % 3)
    ended = {e.action for e in timeline.events}
    assert {str(a) for row in program.rows for a in row if computes(a)} <= ended
    for rank, peaks in enumerate(timeline.peaks):
        mine = [e for e in timeline.events if e.rank == rank and e.stream in ("compute", "recv")]
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
        own = [c for c, home in zip(costs, program.placement, strict=True) if home == rank]
        curve = timeline.memory[rank]
        assert min(curve.sizes) == curve.sizes[-1] == sum(c.static_bytes["parameters"] for c in own)
        assert curve.peak_bytes == sum(peaks.values())
    assert all(curve.sizes[-1] == 0 for curve in timeline.memory[ranks:])


def refusal(check: Callable[..., object], *given: Any) -> ScheduleError | None:
    try:
        check(*given)
    except ScheduleError as error:
        return error
    return None


def is_valid(error: ScheduleError | None, expected: str | None) -> bool:
    """expected: the rule that it breaks."""
    event(f"{expected}")
    assert (error and rule_of(error)) == expected, error
    return error is None


def holds(error: ScheduleError, schedule: Schedule, stages: StageGraph) -> None:
    """What the message says of the schedule is so."""
    for rank, text in re.findall(r"rank (\d+) runs (\d+[A-Z]+\d+)", error.message):
        assert text in map(str, schedule.rows[int(rank)])
    rule = rule_of(error)
    if rule == "order":
        found = re.fullmatch(r"rank (\d+) runs (\S+) before (\S+), which it needs", error.message)
        assert found
        row = list(map(str, schedule.rows[int(found[1])]))
        assert found[3] not in row or row.index(found[2]) < row.index(found[3])
        assert makes(parse_action(found[3])) <= wants(parse_action(found[2]), stages)
        assert error.hint == f"move {found[3]} in front of {found[2]}"
    elif rule == "deadlock":
        states = [stuck(schedule, stages, together=together) for together in (False, True)]
        said = re.findall(r"rank (\d+) at (\S+) needs (\d+[A-Z]+\d+)", error.message)
        found_at = {int(rank): action for rank, action, _ in said}
        assert found_at in [{rank: str(action) for rank, action in at.items()} for at in states]
        circle = re.search(r"in a circle, rank ([\d >-]+):", error.hint or "")
        assert circle
        ranks = circle[1].split(" -> ")
        needs = {rank: parse_action(need) for rank, _, need in said}
        for rank, holder in zip(ranks, ranks[1:], strict=False):
            assert str(schedule.placement[needs[rank].stage]) == holder


def prove_edited(case: Case, seed: int) -> None:
    error = refusal(check, case.schedule, case.stages)
    if is_valid(error, broken_rule(case.schedule, case.stages)):
        run_through(lowered(case), case.stages, seed)
    else:
        holds(error, case.schedule, case.stages)


def prove_program(found: tuple[Case, Program], seed: int) -> None:
    case, program = found
    error = refusal(check_program, program, case.stages)
    if is_valid(error, broken_program_rule(program, case.stages)):
        run_through(program, case.stages, seed)


def lowered(case: Case) -> Program:
    return lower(case.schedule, case.stages)


def with_copies(case: Case) -> Program:
    program = lowered(case)
    return treated(program, Random(0)) if program.columns.trains else program


SEEDS = st.integers(0, 1000)


@SOME
@given(cases(), SEEDS)
def test_every_schedule_as_built_is_valid(case: Case, seed: int) -> None:
    assert broken_rule(case.schedule, case.stages) is None
    program = lowered(case)
    assert broken_program_rule(program, case.stages) is None
    run_through(program, case.stages, seed)


EDITED = {
    "schedules": (edited_schedules(), prove_edited),
    "programs": (edited_programs(lowered, cases()), prove_program),
    "programs with copies": (edited_programs(with_copies, dag_cases()), prove_program),
}


@pytest.mark.parametrize(("cases", "prove"), EDITED.values(), ids=EDITED)
@SOME
@given(data=st.data(), seed=SEEDS)
def test_edited(cases: Any, prove: Callable[[Any, int], None], data: st.DataObject, seed: int) -> None:
    prove(data.draw(cases), seed)


@SOME
@given(cases(), st.data())
def test_edited_frames(case: Case, data: st.DataObject) -> None:
    """Placement, rows and pairs themselves: moved stages, idle ranks, missing rows, other pairs."""
    s = case.schedule
    ranks, some = st.integers(-1, s.ranks), st.sampled_from([a for row in s.rows for a in row])
    what = data.draw(st.sampled_from(["placement", "longer", "row", "fewer", "pairs", "count"]))
    if what == "placement":
        place = list(s.placement)
        place[data.draw(st.integers(0, len(place) - 1))] = data.draw(ranks)
        s = replace(s, placement=tuple(place))
    elif what == "longer":
        s = replace(s, placement=(*s.placement, data.draw(ranks)))
    elif what == "row":
        s = replace(s, rows=(*s.rows, ()))
    elif what == "fewer":
        s = replace(s, rows=s.rows[:-1] or ((),))
    elif what == "pairs":
        s = replace(s, pairs=tuple(data.draw(st.lists(st.tuples(some, some), max_size=2))))
    else:
        s = replace(s, microbatches=s.microbatches + s.slices)
    prove_edited(Case(case.stages, s), 0)


@SOME
@given(edited_schedules())
def test_doing_what_the_messages_say_makes_an_order_valid(case: Case) -> None:
    """Each advice to move an action, or to let it begin alone, is followed until nothing is wrong."""
    s = case.schedule
    for _ in range(400):
        error = refusal(check, s, case.stages)
        if error is None or rule_of(error) not in ("order", "deadlock"):
            break
        assert error.hint
        if alone := re.search(r"let (\S+) begin alone", error.hint):
            s = replace(s, pairs=tuple(pair for pair in s.pairs if alone[1] not in map(str, pair)))
            continue
        move = re.search(r"move (\S+) in front of ([^\s,]+)", error.hint)
        assert move
        rank = s.placement[parse_action(move[1]).stage]
        row = [a for a in s.rows[rank] if str(a) != move[1]]
        at = list(map(str, row)).index(move[2])
        row.insert(at, parse_action(move[1]))
        s = replace(s, rows=(*s.rows[:rank], tuple(row), *s.rows[rank + 1 :]))
    else:
        pytest.fail(f"still {error} after 400 moves")
