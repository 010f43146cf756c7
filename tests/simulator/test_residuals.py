"""Residuals that leave for the host, come back, or are made again: times, memory, reasons, rules."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from edits import Case, dag_cases
from hypothesis import assume, given, strategies as st
from refusals import refused
from shared_links import nodes, random_cluster, treated, treated_case, uneven
from slow_simulator import Slow
from small import alike
from trials import examples

from pipeloom.checks.schedules import check_program
from pipeloom.ir.action import Kind
from pipeloom.ir.cluster import Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import parse_program
from pipeloom.ir.stages import chain
from pipeloom.lowering.passes import lower
from pipeloom.simulator.idle_time.explain import explain_idle_time
from pipeloom.simulator.simulate import simulate
from pipeloom.viewer.chrome import chrome_trace
from pipeloom.viewer.picture import pictures

KEPT = replace(equal_costs(1, residual_bytes=100)[0], offloaded_bytes=30, offload_s=3.0, reload_s=4.0)


def waits_of_the_first(cost: StageCost, *rows: str) -> list[tuple[object, ...]]:
    program = parse_program(1, (0, 1), rows)
    check_program(program, chain(2))
    found = explain_idle_time(program, simulate(program, chain(2), (cost, cost), alike(2)), chain(2))
    return [(i.reason, i.waits_for, i.start_s, i.end_s) for i in found.idle if i.rank == 0]


def test_a_wait_goes_back_to_the_copy_of_the_rank_or_of_another() -> None:
    last = "1RECV_F0<0 1F0 1OFFLOAD0 1RELOAD0 1B0 1SEND_B0>0 1STEP"
    waits = waits_of_the_first(KEPT, "0F0 0SEND_F0>1 0RECV_B0<1 0B0 0STEP", last)
    expected = [("fill", 1.0, 2.0), ("copy", 2.0, 9.0), ("fill", 9.0, 11.0)]
    assert [(reason, *times) for reason, _, *times in waits] == expected
    # Copies between a receive and what uses it do not hide what the backward waits for.
    first = "0F0 0SEND_F0>1 0OFFLOAD0 0RECV_B0<1 0RELOAD0 0B0 0STEP"
    quick, last = replace(KEPT, offload_s=0.5, reload_s=0.5), "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP"
    expected = [("fill", "0RELOAD0", 1.0, 4.0), ("copy", "0RELOAD0", 4.0, 4.5)]
    assert waits_of_the_first(quick, first, last) == expected


def test_copies_are_drawn() -> None:
    program = parse_program(2, (0,), ("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1 0STEP",))
    timeline = simulate(program, chain(1), (KEPT,), alike(1))
    assert {"offload", "reload"} <= {group["name"] for group in pictures([timeline])[0]["groups"]}
    trace = chrome_trace([timeline])["traceEvents"]
    assert {e["name"] for e in trace if e["ph"] == "C"} == {"device memory", "host memory"}
    assert {e["args"]["name"] for e in trace if e["name"] == "thread_name"} == {"compute", "d2h", "h2d"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0F0 0OFFLOAD0", "drop it: what only runs forward"),
        ("0F0 0OFFLOAD0 0B0 0STEP", "add 0RELOAD0 between 0OFFLOAD0 and 0B0"),
        ("0F0 0RELOAD0 0B0 0STEP", "add 0OFFLOAD0 between 0F0 and 0RELOAD0"),
        ("0F0 0RELOAD0 0OFFLOAD0 0B0 0STEP", "move 0OFFLOAD0 in front of 0RELOAD0"),
        ("0F0 0OFFLOAD0 0B0 0RELOAD0 0STEP", "move 0RELOAD0 in front of 0B0"),
        ("0F0 0OFFLOAD0 0RECOMPUTE0 0RELOAD0 0B0 0STEP", "move 0RELOAD0 in front of 0RECOMPUTE0"),
        ("0F0 0I0 0RECOMPUTE0 0W0 0STEP", "move 0RECOMPUTE0 in front of 0I0"),
    ],
)
def test_every_rule_has_its_message(row: str, words: str) -> None:
    assert words in refused(ScheduleError, check_program, parse_program(1, (0,), (row,)), chain(1))


def held_by_hand(program, stages, costs, timeline, rank: int) -> dict[str, dict[float, int]]:
    """Residual bytes of a rank in both tiers from each time on, added up change by change."""
    at = {e.action: e for e in timeline.events if e.stream in ("compute", "d2h", "h2d")}
    row = [a for a in program.rows[rank] if not (a.is_transfer or a.is_stage_wide)]
    change: dict[str, dict[float, int]] = {"device": defaultdict(int), "host": defaultdict(int)}
    for a in row:
        cost, event = costs[a.stage], at[str(a)]
        again = replace(a, kind=Kind("RECOMPUTE")) in row
        begin, end = {
            "F": (cost.residual_bytes - again * cost.recomputed_bytes, 0),
            "OFFLOAD": (0, -cost.offloaded_bytes),
            "RELOAD": (cost.offloaded_bytes, 0),
            "RECOMPUTE": (cost.recomputed_bytes, 0),
            "B": (0, -cost.residual_bytes),
            "I": (0, cost.carried_bytes - cost.residual_bytes),
            "W": (0, -cost.carried_bytes),
        }[a.kind]
        change["device"][event.start_s] += begin
        change["device"][event.end_s] += end
        change["host"][event.start_s] += cost.offloaded_bytes * (a.kind == "OFFLOAD")
        change["host"][event.end_s] -= cost.offloaded_bytes * (a.kind == "RELOAD")
    held: dict[str, dict[float, int]] = {}
    for tier, at_times in change.items():
        held[tier], total = {}, 0
        for time in sorted(at_times):
            total += at_times[time]
            held[tier][time] = total
    return held


@examples(20, 60)
@given(dag_cases(), st.integers(0, 2**32))
def test_residuals_of_random_programs_are_held_as_added_up_by_hand(case: Case, seed: int) -> None:
    empty = tuple(replace(c, value=replace(c.value, shape=(0,))) for c in case.stages.crossings)
    stages = replace(case.stages, crossings=empty)
    plain, dice = lower(case.schedule, stages), Random(seed)
    assume(plain.columns.trains)
    program = treated(plain, dice)
    check_program(program, stages)
    costs, where = uneven(len(stages.stages), dice), random_cluster(len(program.rows), dice)
    timeline = simulate(program, stages, costs, where)
    explain_idle_time(program, timeline, stages)
    for rank in range(timeline.ranks):
        held = held_by_hand(program, stages, costs, timeline, rank)
        for curve in (curve for curve in timeline.memory if curve.rank == rank):
            own = dict(zip(curve.times_s, curve.sizes, strict=True))
            for time, size in held[curve.tier].items():
                assert [s for t, s in own.items() if t <= time][-1] == size
            assert curve.peak_bytes >= max(held[curve.tier].values(), default=0)
            assert own[max(own)] == 0 and min(own.values()) >= 0


LINK = Link(bandwidth_bytes_per_s=4.0)

EQUAL = equal_costs(1)[0]


@pytest.mark.parametrize("shared", [None, LINK])
def test_sums_for_owners_take_half_as_long(shared: Link | None) -> None:
    """Each of two replicas gets the sums of its own part of what they share. y is read by others too."""
    stages = dag(4, [], params={0: ("a", "b", "y"), 1: ("a", "b", "y"), 2: ("y",), 3: ("y",)})
    program = parse_program(1, (0, 1, 2, 3), tuple(f"{s}F0 {s}B0 {s}REDUCE {s}STEP" for s in range(4)))
    where = nodes(0, 1, 2, 3, between_nodes=LINK, node_link=shared)
    for owners, seconds in ((frozenset(), 4.0 + 3.0), (frozenset("ab"), 2.0 + 3.0)):
        cost = replace(EQUAL, tied_bytes={"a": 8, "b": 8, "y": 8}, for_owners=owners)
        events = simulate(program, stages, (cost,) * 4, where).events
        (summed,) = (event for event in events if event.action == "0REDUCE")
        assert (summed.start_s, summed.duration_s) == (3.0, seconds)


@examples(26, 80)
@given(dag_cases(), st.integers(0, 2**32), st.integers(1, 3))
def test_random_programs_run_as_a_plain_simulator_says(case: Case, seed: int, ahead: int) -> None:
    dice = Random(seed)
    program, stages, costs = treated_case(case, dice)
    where = random_cluster(len(program.rows), dice)
    timeline = simulate(program, stages, costs, where, receive_ahead=ahead)
    expected = Slow(program, stages, costs, where, ahead).run()
    seen = {(e.stream, e.action): (e.start_s, e.end_s) for e in timeline.events if e.stream != "recv"}
    assert seen == expected
