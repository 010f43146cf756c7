"""Links that several ranks share: first come, first served."""

from dataclasses import replace
from random import Random

import pytest
from edits import Case, dag_cases
from hypothesis import given, strategies as st
from shared_links import nodes, random_cluster, treated_case
from slow_simulator import Slow
from trials import examples

from pipeloom.ir.cluster import Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import parse_program
from pipeloom.simulator.simulate import simulate

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
