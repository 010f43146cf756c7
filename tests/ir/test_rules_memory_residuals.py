"""The rule for memory where programs offload and recompute: its peaks against the simulator's."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from edits import Case, dag_cases
from hypothesis import given, settings, strategies as st
from residuals import treated, uneven

from pipeloom import schedules
from pipeloom.checks import peak_bytes, peaks
from pipeloom.ir.action import Action
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.lowering import lower
from pipeloom.simulator import simulate

COST = StageCost(
    forward_s=1.0,
    backward_s=2.0,
    input_grad_s=1.0,
    weight_grad_s=1.0,
    residual_bytes=100,
    offloaded_bytes=30,
    recomputed_bytes=20,
    offload_s=3.0,
    reload_s=4.0,
    recompute_s=0.5,
    static_bytes={"parameters": 1000},
    transient_bytes={"B": 7, "RECOMPUTE": 3, "OFFLOAD": 1, "RELOAD": 2},
)
USERS = ("RECOMPUTE", "B", "I")


def simulated(program: Program, stages: StageGraph, costs: tuple[StageCost, ...]) -> list[int]:
    ranks = program.columns.ranks
    link = Link(bandwidth_bytes_per_s=float("inf"))
    cluster = Cluster(devices=(Device(name="any", memory_bytes=1),) * ranks, within_node=link)
    timeline = simulate(program, stages, costs, cluster)
    return [timeline.peak_bytes(rank) for rank in range(ranks)]


def found(program: Program, stages: StageGraph, costs: tuple[StageCost, ...]) -> list[int]:
    return [peak.bytes for peak in peaks(program, stages, costs)]


def at_once(costs: tuple[StageCost, ...]) -> tuple[StageCost, ...]:
    return tuple(replace(cost, offload_s=0.0, reload_s=0.0) for cost in costs)


def reloaded_late(program: Program) -> Program:
    """The same with each RELOAD right in front of what needs it."""
    rows = []
    for row in program.rows:
        late = {replace(a, kind="") for a in row if isinstance(a, Action) and a.kind == "RELOAD"}
        made = []
        for step in row:
            if isinstance(step, Action) and step.kind == "RELOAD":
                continue
            if isinstance(step, Action) and step.kind in USERS and replace(step, kind="") in late:
                late.remove(replace(step, kind=""))
                made.append(replace(step, kind="RELOAD"))
            made.append(step)
        rows.append(tuple(made))
    return replace(program, rows=tuple(rows))


def empty_messages(stages: StageGraph) -> StageGraph:
    """What messages hold depends on times."""
    crossings = tuple(replace(c, value=replace(c.value, shape=(0,))) for c in stages.crossings)
    return replace(stages, crossings=crossings, params=((),) * len(stages.stages))


def test_what_is_recomputed_or_offloaded_is_not_counted_as_kept() -> None:
    row = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD1 0RECOMPUTE1 0B1 0RELOAD0 0B0 0STEP"
    program = parse_program(2, (0,), (row,))
    kept = parse_program(2, (0,), ("0F0 0F1 0B1 0B0 0STEP",))
    (plain,), (peak,) = peaks(kept, chain(1), (COST,)), peaks(program, chain(1), (COST,))
    assert (plain.bytes, str(plain.at)) == (1207, "0B1")
    # F1 holds 70 of micro-batch 0 and 80 of 1; RECOMPUTE1 makes it 70 and 100, and B1 has its scratch.
    assert (peak.bytes, str(peak.at)) == (1177, "0B1")
    assert [peak.bytes] == simulated(program, chain(1), at_once((COST,)))
    assert simulated(program, chain(1), (COST,)) == [1181]  # F1 runs beside OFFLOAD0


def test_a_reload_that_waits_for_another_one_holds_its_bytes_later_than_the_rule_says() -> None:
    row = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD1 0RELOAD0 0B2 0B1 0B0 0STEP"
    cost = replace(COST, recomputed_bytes=0, transient_bytes={}, offload_s=0.0, reload_s=2.5)
    program = parse_program(3, (0,), (row,))
    assert found(program, chain(1), (cost,)) == [1300]
    assert found(reloaded_late(program), chain(1), (cost,)) == [1240]
    assert simulated(program, chain(1), (cost,)) == [1270]


def test_caps_are_proved_for_programs_too() -> None:
    stages = chain(2)
    policy = MemoryPolicy(stages=({"a": "offload", "b": "recompute"},) * 2, ahead=(0, 1))
    program = lower(schedules.build("gpipe", stages, (0, 1), 4), stages, policy=policy)
    costs = (replace(COST, transient_bytes={}),) * 2
    least = found(program, empty_messages(stages), costs)
    peak_bytes(program, empty_messages(stages), costs, [float(size) for size in least])
    with pytest.raises(ScheduleError) as caught:
        peak_bytes(program, empty_messages(stages), costs, [least[0] - 1.0, float(least[1])])
    assert caught.value.message == "rank 0 needs 1.2 KiB at 0RELOAD1: 1 B above its cap of 1.2 KiB"


def test_the_remedy_brings_back_what_the_moved_backward_needs() -> None:
    row = "0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0RECOMPUTE0 0B0 0B1 0B2 0STEP"
    program = parse_program(3, (0,), (row,))
    cost = replace(COST, transient_bytes={}, static_bytes={})
    with pytest.raises(ScheduleError) as caught:
        peak_bytes(program, chain(1), (cost,), [200.0])
    assert caught.value.message.startswith("rank 0 needs 250 B at 0F2: 50 B above its cap")
    assert caught.value.hint.startswith(
        "keep fewer in flight: move 0RELOAD0 0RECOMPUTE0 0B0 in front of 0F2, or use smaller"
    )


@settings(max_examples=100, deadline=None)
@given(dag_cases(), st.integers(0, 2**32))
def test_as_the_simulator_says_where_copies_take_no_time(case: Case, seed: int) -> None:
    dice = Random(seed)
    stages = empty_messages(case.stages)
    program = lower(case.schedule, stages)
    if program.columns.trains:
        program = treated(program, dice)
    costs = uneven(len(stages.stages), dice)
    assert found(program, stages, at_once(costs)) == simulated(program, stages, at_once(costs))
    certain = found(reloaded_late(program), stages, costs)
    assert all(a <= b for a, b in zip(certain, simulated(program, stages, costs), strict=True))
    assert all(a <= b for a, b in zip(certain, found(program, stages, costs), strict=True))
