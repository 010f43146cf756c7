"""Waits for links that several ranks share: the reason, and what held the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from edits import Case, dag_cases
from hypothesis import given, settings, strategies as st
from shared_links import nodes, on_switches, random_cluster, sum_beside_a_message, treated_case

from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.explanation import Explanation
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import StageGraph
from pipeloom.schedules.scenario import Scenario, explain as drawn_reasons, simulate_schedule
from pipeloom.simulator.idle_time.explain import explain_idle_time
from pipeloom.simulator.simulate import simulate
from pipeloom.viewer.path import fold
from pipeloom.viewer.reasons import sentence, sources

SECOND = Link(bandwidth_bytes_per_s=4.0)
"""A message of the tests below takes one second of it."""


def explained(
    program: Program, stages: StageGraph, costs: Sequence[StageCost], where: Cluster
) -> Explanation:
    return explain_idle_time(program, simulate(program, stages, tuple(costs), where), stages, where)


def test_a_message_that_waits_for_its_nodes_link_names_what_held_it() -> None:
    """Ranks 0 and 1 leave one node; rank 3 has computed before, and waits for what rank 1 sends."""
    stages = dag(5, [(0, 2), (1, 3)], loss_stage=3)
    rows = ("0F0 0SEND_F0>2", "1F0 1SEND_F0>3", "2RECV_F0<0 2F0", "4F0 3RECV_F0<1 3F0")
    program = parse_program(1, (0, 1, 2, 3, 3), rows)
    costs = (*(replace(equal_costs(1)[0], forward_s=s) for s in (1.0, 1.5)), *equal_costs(3))
    where = nodes(0, 0, 1, 2, between_nodes=SECOND, node_link=SECOND)
    timeline = simulate(program, stages, costs, where)
    found = explain_idle_time(program, timeline, stages, where)
    link, moves = (i for i in found.idle if i.rank == 3)
    assert (link.reason, link.start_s, link.end_s) == ("link", 1.0, 2.0)
    assert (link.waits_for, link.waiting, link.root, link.root_rank) == ("1F0", "1SEND_F0>3", "0SEND_F0>2", 0)
    assert sentence(link) == (
        "rank 3 waits for 1F0 of rank 1: 1SEND_F0>3 waits for a shared link, which 0SEND_F0>2 of rank 0 holds"
    )
    assert (moves.reason, moves.start_s, moves.end_s, moves.waiting) == ("transfer", 2.0, 3.0, "")
    assert [(p.kind, p.action, p.start_s, p.end_s, p.waiting) for p in found.path] == [
        ("compute", "0F0", 0.0, 1.0, ""),
        ("transfer", "0SEND_F0>2", 1.0, 2.0, "1SEND_F0>3"),
        ("transfer", "1SEND_F0>3", 2.0, 3.0, ""),
        ("compute", "3F0", 3.0, 4.0, ""),
    ]
    assert " ".join(map(str, fold(found.path))) == (
        "0F0, 0SEND_F0>2 on the link that 1SEND_F0>3 waits for 1SEND_F0>3 3F0"
    )
    assert "rank 3 waits for F of rank 1, held up on a shared link by SEND of rank 0" in {
        source.text for source in sources(found)
    }
    blind = explain_idle_time(program, timeline, stages)
    assert "link" not in blind.by_reason


def test_a_copy_that_waits_for_its_switch_names_what_held_it() -> None:
    copied = {"residual_bytes": 8, "offloaded_bytes": 8, "offload_s": 1.0, "reload_s": 1.0}
    cost = replace(equal_costs(1)[0], **copied)
    row = "{0}F0 {0}OFFLOAD0 {0}RELOAD0 {0}B0 {0}STEP"
    program = parse_program(1, (0, 1), tuple(row.format(stage) for stage in (0, 1)))
    where = on_switches("a", "a", a=SECOND)  # 2 s a copy
    found = explained(program, dag(2, []), (cost, replace(cost, forward_s=1.25)), where)
    waits = [i for i in found.idle if i.rank == 1]
    assert [(i.reason, i.start_s, i.end_s, i.waiting, i.root) for i in waits] == [
        ("link", 1.25, 3.0, "1OFFLOAD0", "0OFFLOAD0"),
        ("copy", 3.0, 7.0, "", "0OFFLOAD0"),
    ]
    assert "1OFFLOAD0 waits for a shared link, which 0OFFLOAD0 of rank 0 holds" in sentence(waits[0])


def test_a_message_that_waits_for_a_sum_names_it() -> None:
    where = nodes(0, 0, 1, 2, between_nodes=SECOND, node_link=SECOND)
    found = explained(*sum_beside_a_message(), where)
    held = [(p.kind, p.action, p.start_s, p.end_s) for p in found.path if p.waiting == "1SEND_F0>3"]
    assert held == [("reduce", "0REDUCE", 3.0, 5.0)]


def test_ranks_of_a_node_share_links_in_schedules_too() -> None:
    setting = Scenario(ranks=6, microbatches=12, chunks=3, transfer_s=0.8)
    apart, shared = (simulate_schedule("interleaved_1f1b", replace(setting, per_node=n)) for n in (0, 3))
    assert shared.summary.step_s > apart.summary.step_s
    assert "link" in drawn_reasons(shared).by_reason and "link" not in drawn_reasons(apart).by_reason
    line = Scenario(ranks=4, microbatches=8, transfer_s=0.8)
    alone = [simulate_schedule("1f1b", replace(line, per_node=n)).summary.step_s for n in (0, 1, 2)]
    assert alone == [pytest.approx(alone[0])] * 3  # one pair of ranks on each link, in either direction


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(dag_cases(), st.integers(0, 2**32), st.integers(1, 3))
def test_no_wait_of_a_simulated_step_is_left_without_a_cause(case: Case, seed: int, ahead: int) -> None:
    """With the cluster known, nothing is put down to overhead; what held a link had it when it says so."""
    dice = Random(seed)
    program, stages, costs = treated_case(case, dice)
    some = random_cluster(len(program.rows), dice)
    where = replace(some, within_node=replace(some.within_node, overhead_s=0.0))
    timeline = simulate(program, stages, costs, where, receive_ahead=ahead)
    found = explain_idle_time(program, timeline, stages, where)
    assert "overhead" not in found.by_reason
    assert "overhead" not in {step.kind for step in found.path}
    at = {e.action: e for e in timeline.events}
    for step in found.path:
        if step.waiting:
            assert at[step.action].start_s <= step.start_s < step.end_s == at[step.waiting].start_s
            assert at[step.waiting].stream == at[step.action].stream or step.kind == "reduce"
    for idle in found.idle:
        if idle.reason == "link":
            assert at[idle.root].end_s > 0 and idle.root_rank == at[idle.root].rank
            assert at[idle.waiting].start_s > at[idle.root].start_s
