"""Links that several ranks share: first come, first served."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from edits import Case, dag_cases
from hypothesis import given, settings, strategies as st
from shared_links import INSTANT, nodes, random_cluster, treated, treated_case, uneven
from slow_simulator import Slow

from pipeloom.ir import kernels
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import parse_program
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.all_reduce import all_reduce_s
from pipeloom.simulator.simulate import simulate


def times(timeline: Timeline, *streams: str) -> dict[str, tuple[float, float]]:
    return {e.action: (e.start_s, e.end_s) for e in timeline.events if e.stream in streams}


LINK, FAST = Link(bandwidth_bytes_per_s=4.0), Link(bandwidth_bytes_per_s=16.0)
"""A message of the tests below takes one second of LINK."""

TO_EACH = ("0F0 0SEND_F0>2", "1F0 1SEND_F0>3", "2RECV_F0<0 2F0", "3RECV_F0<1 3F0")


@pytest.mark.parametrize(
    ("on", "shared", "first", "second"),
    [
        # Ranks 0 and 1 send 4 bytes each over one network link; rank 1 is ready first.
        ((0, 0, 1, 2), None, (1.0, 2.0), (1.5, 2.5)),
        ((0, 0, 1, 2), LINK, (1.0, 2.0), (2.0, 3.0)),  # out of one node
        ((0, 1, 2, 2), LINK, (1.0, 2.0), (2.0, 3.0)),  # into one
        ((0, 1, 2, 3), LINK, (1.0, 2.0), (1.5, 2.5)),  # each has its own
        # The node's link, four times as fast as a message, is held for 0.25 s.
        ((0, 0, 1, 1), FAST, (1.0, 2.0), (1.5, 2.5)),
    ],
)
def test_messages_out_of_one_node_follow_each_other(on, shared, first, second) -> None:
    stages = dag(4, [(0, 2), (1, 3)], loss_stage=3)
    program = parse_program(1, (0, 1, 2, 3), TO_EACH)
    costs = tuple(replace(EQUAL, forward_s=s) for s in (1.5, 1.0, 1.0, 1.0))
    timeline = simulate(program, stages, costs, nodes(*on, between_nodes=LINK, node_link=shared))
    assert times(timeline, "send") == {"1SEND_F0>3": first, "0SEND_F0>2": second}


EQUAL = equal_costs(1)[0]


@pytest.mark.parametrize(
    ("size", "on", "seconds"),
    [
        (8, (0, 1), 2.0),
        (8, (0, 1, 1), 2.0),
        # A ring is not faster than the links of the nodes that it crosses.
        (16, (0, 0, 1, 1), 6.0),
        (16, (0, 1, 0, 1), 12.0),
    ],
)
def test_sums_over_ranks_take_the_links_of_nodes_into_account(size, on, seconds) -> None:
    ranks = tuple(range(len(on) if size == 16 else 2))
    assert all_reduce_s(size, ranks, nodes(*on, node_link=LINK)) == seconds


def sum_times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {e.action: (e.start_s, e.end_s) for e in timeline.events if "REDUCE" in e.action}


@pytest.mark.parametrize("shared", [None, LINK])
def test_sums_for_owners_take_half_as_long(shared: Link | None) -> None:
    """Each of two replicas gets the sums of its own part of what they share. y is read by others too."""
    stages = dag(4, [], params={0: ("a", "b", "y"), 1: ("a", "b", "y"), 2: ("y",), 3: ("y",)})
    program = parse_program(1, (0, 1, 2, 3), tuple(f"{s}F0 {s}B0 {s}REDUCE {s}STEP" for s in range(4)))
    where = nodes(0, 1, 2, 3, between_nodes=LINK, node_link=shared)
    for owners, seconds in ((frozenset(), 4.0 + 3.0), (frozenset("ab"), 2.0 + 3.0)):
        cost = replace(EQUAL, tied_bytes={"a": 8, "b": 8, "y": 8}, for_owners=owners)
        assert sum_times(simulate(program, stages, (cost,) * 4, where))["0REDUCE"] == (3.0, 3.0 + seconds)


@settings(max_examples=80, deadline=None)
@given(dag_cases(), st.integers(0, 2**32), st.integers(1, 3))
def test_random_programs_run_as_a_plain_simulator_says(case: Case, seed: int, ahead: int) -> None:
    dice = Random(seed)
    program, stages, costs = treated_case(case, dice)
    where = random_cluster(len(program.rows), dice)
    timeline = simulate(program, stages, costs, where, receive_ahead=ahead)
    expected = Slow(program, stages, costs, where, ahead).run()
    seen = {(e.stream, e.action): (e.start_s, e.end_s) for e in timeline.events if e.stream != "recv"}
    assert seen == expected


@settings(max_examples=20, deadline=None)
@given(dag_cases(), st.integers(0, 2**32), st.integers(1, 3))
def test_shared_links_that_take_no_time_change_nothing(case: Case, seed: int, ahead: int) -> None:
    dice = Random(seed)
    program, stages, costs = treated_case(case, dice)
    some = random_cluster(len(program.rows), dice)
    plain = replace(some, node_link=None, devices=tuple(replace(d, switch=None) for d in some.devices))
    shared = replace(
        some,
        node_link=INSTANT,
        switches={f"{d.node}": INSTANT for d in some.devices},
        devices=tuple(replace(d, switch=f"{d.node}") for d in some.devices),
    )
    one = simulate(program, stages, costs, plain, receive_ahead=ahead)
    other = simulate(program, stages, costs, shared, receive_ahead=ahead)
    assert one.events == other.events
    assert one.memory == other.memory


@pytest.mark.slow
def test_compiled_kernels_say_what_the_plain_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Random(3)
    stages = dag(6, [(a, b) for a in range(6) for b in range(a + 1, 6)])
    made = registry.build("1f1b", stages, (0, 1, 2, 3, 0, 1), 8, split_backward=True)
    program = treated(lower(made, stages), dice)
    costs = uneven(6, dice)
    devices = tuple(Device(name="any", memory_bytes=1, node=r // 2, switch=f"s{r // 2}") for r in range(4))
    slow = Link(bandwidth_bytes_per_s=3.0, latency_s=0.1)
    where = Cluster(devices=devices, within_node=slow, node_link=slow, switches={"s0": slow, "s1": slow})
    monkeypatch.setattr(kernels, "COMPILED_FROM", 1 << 62)
    plain = simulate(program, stages, costs, where)
    monkeypatch.setattr(kernels, "COMPILED_FROM", 0)
    compiled = simulate(program, stages, costs, where)
    assert compiled.events == plain.events
    assert compiled.memory == plain.memory
    assert plain.step_s > simulate(program, stages, costs, replace(where, node_link=None)).step_s
