"""Under a cap, an action that would pass it waits for copies to the host, in the simulator as in a run."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from edits import Case, dag_cases
from hypothesis import given, settings, strategies as st
from residuals import treated, uneven
from slow_cap_waits import SlowRoom

from pipeloom.checks import check_program
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.errors import PlanError
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering import lower
from pipeloom.simulator import explain_idle_time, simulate

COST = StageCost(
    forward_s=1.0,
    backward_s=2.0,
    input_grad_s=1.0,
    weight_grad_s=1.0,
    residual_bytes=100,
    offloaded_bytes=100,
    offload_s=3.0,
    reload_s=0.5,
)
ROW = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD1 0B2 0RELOAD0 0B1 0B0 0STEP"


def cluster(ranks: int, *, switch: bool = False) -> Cluster:
    link = Link(bandwidth_bytes_per_s=float("inf"))
    shared = {"sw": Link(bandwidth_bytes_per_s=1e9)} if switch else {}
    devices = (Device(name="any", memory_bytes=1, switch="sw" if switch else None),) * ranks
    return Cluster(devices=devices, within_node=link, switches=shared)


def program() -> Program:
    made = parse_program(3, (0,), (ROW,))
    check_program(made, chain(1))
    return made


def at(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {e.action: (e.start_s, e.end_s) for e in timeline.events}


@pytest.mark.parametrize("switch", [False, True])
def test_an_action_waits_for_room(switch: bool) -> None:
    where = cluster(1, switch=switch)
    free = simulate(program(), chain(1), (COST,), where)
    assert free.peak_bytes(0) == 300 and at(free)["0F2"] == (2.0, 3.0)
    roomy = simulate(program(), chain(1), (COST,), where, caps=(300,))
    assert list(roomy.events) == list(free.events)
    timeline = simulate(program(), chain(1), (COST,), where, caps=(200,))
    assert timeline.peak_bytes(0) == 200
    times = at(timeline)
    assert times["0OFFLOAD0"] == (1.0, 4.0) and times["0F1"] == (1.0, 2.0)
    assert times["0F2"] == (4.0, 5.0)  # once OFFLOAD0 has ended
    assert times["0RELOAD1"] == (7.0, 7.5)  # OFFLOAD1 holds it up anyway
    assert times["0B2"] == (5.0, 7.0)
    assert times["0B1"] == (7.5, 9.5)


def test_the_wait_is_explained() -> None:
    found = explain_idle_time(
        program(), simulate(program(), chain(1), (COST,), cluster(1), caps=(200,)), chain(1)
    )
    first = found.idle[0]
    assert (first.reason, first.waits_for, first.action, first.start_s, first.end_s) == (
        "copy",
        "0OFFLOAD0",
        "0F2",
        2.0,
        4.0,
    )


def test_a_reload_waits_for_room_too() -> None:
    row = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0RELOAD1 0B1 0B0 0STEP"
    made = parse_program(2, (0,), (row,))
    slow = replace(COST, offload_s=0.0, offloaded_bytes=60)
    times = at(simulate(made, chain(1), (slow,), cluster(1)))
    assert times["0RELOAD0"] == (2.0, 2.5)
    # OFFLOAD0 is over at 1 s, OFFLOAD1 at 5 s; 40 and 100 bytes are there at 2 s.
    own = {made.rows[0][1]: 0.0, made.rows[0][3]: 3.0}
    late = simulate(made, chain(1), (slow,), cluster(1), caps=(199,), action_s=own)
    assert at(late)["0RELOAD0"] == (5.0, 5.5)
    assert late.peak_bytes(0) == 200  # what cannot be kept is passed: whoever gave the cap refuses it


def test_what_does_not_fit_passes_the_cap_and_ends() -> None:
    timeline = simulate(program(), chain(1), (COST,), cluster(1), caps=(50,))
    assert timeline.peak_bytes(0) == 200  # 0RELOAD1 comes beside 0B2: no copy would make room for it
    assert at(timeline)["0F1"] == (4.0, 5.0)


def test_caps_are_one_per_rank() -> None:
    with pytest.raises(PlanError, match="2 caps for 1 ranks"):
        simulate(program(), chain(1), (COST,), cluster(1), caps=(1, 1))


def links(ranks: int, dice: Random) -> Cluster:
    near = Link(bandwidth_bytes_per_s=17.0, latency_s=0.1, overhead_s=0.05)
    far = Link(bandwidth_bytes_per_s=11.0, latency_s=0.3)
    switched = dice.random() < 0.5
    devices = tuple(
        Device(name="any", memory_bytes=1, node=r // 4, switch="sw" if switched and r < 3 else None)
        for r in range(ranks)
    )
    shared = {"sw": Link(bandwidth_bytes_per_s=40.0 + dice.random())}
    return Cluster(devices=devices, within_node=near, between_nodes=far, switches=shared)


@settings(max_examples=50, deadline=None)
@given(dag_cases(), st.integers(0, 2**32), st.integers(1, 3))
def test_random_programs_wait_as_a_plain_simulator_does(case: Case, seed: int, ahead: int) -> None:
    stages = replace(case.stages, params=((),) * len(case.stages.stages))
    made = lower(case.schedule, stages)
    if not made.columns.trains:
        return
    dice = Random(seed)
    made = treated(made, dice)
    check_program(made, stages)
    costs = tuple(
        replace(c, transient_bytes={k: dice.randint(0, 30) for k in "FB"}, static_bytes={"batch": 7})
        for c in uneven(len(stages.stages), dice)
    )
    where = links(len(made.rows), dice)
    free = simulate(made, stages, costs, where, receive_ahead=ahead)
    caps = [round(free.peak_bytes(r) * dice.uniform(0.5, 1.05)) for r in range(free.ranks)]
    timeline = simulate(made, stages, costs, where, receive_ahead=ahead, caps=caps)
    slow = SlowRoom(made, stages, costs, where, ahead, caps=caps)
    times = slow.run()
    seen = {(e.stream, e.action): (e.start_s, e.end_s) for e in timeline.events if e.stream != "recv"}
    assert seen == times
    explain_idle_time(made, timeline, stages)
