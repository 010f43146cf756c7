"""Idle reasons and critical paths: by hand, and as laws for random graphs and for the library."""

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from edits import Case, dag_cases
from hypothesis import given, settings, strategies as st
from shared_links import nodes, on_switches, random_cluster, sum_beside_a_message, treated_case
from small import alike, built, simulated, whole_costs
from trials import examples

from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.explanation import REASONS, Explanation, Idle
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.steady import steady_step
from pipeloom.ir.timeline import Event, Timeline
from pipeloom.ir.weight_policies import Updates
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.scenario import Scenario, explain as drawn_reasons, simulate_schedule
from pipeloom.simulator.idle_time.explain import explain_idle_time
from pipeloom.simulator.simulate import simulate
from pipeloom.viewer.reasons import path_lines, sentence, sources

Explained = tuple[Program, Timeline, Explanation]
Costs = tuple[StageCost, ...]


def explained(program: Program, timeline: Timeline, stages: StageGraph) -> Explained:
    """Obeys the laws, whatever else a test asks."""
    found = explain_idle_time(program, timeline, stages)
    obey_the_laws(timeline, found)
    return program, timeline, found


def step(name: str, ranks=4, microbatches=8, *, costs: Costs = (), latency_s=0.0) -> Explained:
    made, stages = built(name, ranks, microbatches), registry.default_placement(name, ranks)[0]
    timeline = simulated(made, costs, stages, alike(ranks, latency_s=latency_s))
    return explained(lower(made, stages), timeline, stages)


def obey_the_laws(timeline: Timeline, found: Explanation) -> None:
    """Idle and busy time fill every rank; the path has no hole and is as long as the step."""
    for rank in range(timeline.ranks):
        mine = [i for i in found.idle if i.rank == rank]
        busy = [e for e in timeline.events if e.rank == rank and e.stream == "compute"]
        spans = sorted([(i.start_s, i.end_s) for i in mine] + [(e.start_s, e.end_s) for e in busy])
        assert [start for start, _ in spans] == [0.0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == timeline.step_s
    assert all(i.duration_s > 0 and i.reason in REASONS for i in found.idle)
    times = [0.0, *(p.end_s for p in found.path)]
    assert [p.start_s for p in found.path] == times[:-1] and times[-1] == timeline.step_s
    assert all(p.end_s > p.start_s for p in found.path)


def name_what_really_ended(program: Program, timeline: Timeline, found: Explanation) -> None:
    """A wait ends when what it is said to wait for, or the message that carries it, is there.

    The first of a pair also waits for what the second needs.
    """
    second = {str(first): other.stage for first, other in program.pairs}
    computed = {e.action: e for e in timeline.events if e.stream == "compute"}
    arrived = {
        (e.action.split("SEND_")[0], e.action.split(">")[1], e.end_s)
        for e in timeline.events
        if e.stream == "send"
    }

    def stage_of(action: str) -> str:
        return re.split("[A-Z]", action)[0]

    for wait in found.idle:
        if wait.action and wait.waits_for and computed[wait.action].start_s == wait.end_s:
            maker, stage = computed[wait.waits_for], stage_of(wait.action)
            assert maker.rank == wait.on_rank != wait.rank
            stages, sender = {stage, str(second.get(wait.action, stage))}, stage_of(wait.waits_for)
            assert maker.end_s == wait.end_s or arrived & {(sender, one, wait.end_s) for one in stages}
        if wait.root in computed:
            assert computed[wait.root].rank == wait.root_rank
            assert computed[wait.root].end_s <= computed[wait.action].start_s
        else:
            assert wait.root == "" or "SEND" in wait.root


def test_1f1b_by_hand() -> None:
    _, _, found = step("1f1b")
    assert found.by_reason == {"fill": 12.0, "drain": 12.0, "warm-up": 6.0, "order": 6.0}
    first = next(i for i in found.idle if i.rank == 0)
    waits = {"action": "0B0", "waits_for": "1B0", "on_rank": 1}
    assert first == Idle(rank=0, start_s=4.0, end_s=10.0, reason="fill", **waits)
    late = next(i for i in found.idle if i.rank == 0 and i.reason == "order")
    assert (late.action, late.waits_for, late.root, late.root_rank) == ("0B5", "1B5", "1F7", 1)
    words = " ".join(p.action for p in found.path)
    assert words.startswith("0F0 1F0 2F0 3F0 3B0 3F1 3B1") and words.endswith("3F7 3B7 2B7 1B7 0B7")


def test_a_slow_rank_is_named_and_gets_no_more_than_its_share() -> None:
    cost = equal_costs(1)[0]
    slow = equal_costs(1, forward_s=2.0, input_grad_s=2.0, weight_grad_s=2.0)[0]
    _, _, found = step("1f1b", microbatches=32, costs=(cost, cost, slow, cost))
    for rank in (0, 1, 3):
        mine = [i for i in found.idle if i.rank == rank and i.reason == "imbalance"]
        assert {i.root_rank for i in mine} == {2}
        assert 0.9 * 96 <= sum(i.duration_s for i in mine) <= 96
    assert not [i for i in found.idle if i.rank == 2 and i.reason == "imbalance"]
    assert sum(p.end_s - p.start_s for p in found.path if p.rank == 2) >= 31 * 6.0


TWO = parse_program(2, (0, 1), ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1"))


def measured(ranks: int, *events: tuple[int, str, str, float, float]) -> Timeline:
    made = (Event(rank=r, stream=s, action=a, start_s=b, end_s=e) for r, s, a, b, e in events)
    return Timeline(source="measured", ranks=ranks, events=tuple(made))


def test_a_measured_step_has_overhead_and_no_send_events() -> None:
    timeline = measured(
        2,
        (0, "compute", "0F0", 0.25, 1.0),
        (0, "compute", "0F1", 1.25, 2.0),
        (0, "recv", "END", 2.0, 4.5),
        (1, "recv", "1RECV_F0<0", 0.0, 1.5),
        (1, "compute", "1F0", 1.75, 3.0),
        (1, "recv", "1RECV_F1<0", 3.0, 3.25),
        (1, "compute", "1F1", 3.5, 4.5),
    )
    _, _, found = explained(TWO, timeline, chain(2))
    assert [(i.rank, i.reason, i.start_s, i.end_s) for i in found.idle] == [
        (0, "warm-up", 0.0, 0.25),
        (0, "overhead", 1.0, 1.25),
        (0, "drain", 2.0, 4.5),
        (1, "warm-up", 0.0, 1.75),
        (1, "transfer", 3.0, 3.25),
        (1, "overhead", 3.25, 3.5),
    ]
    path = [p.action for p in found.path if p.kind != "overhead"]
    assert path == ["0F0", "0SEND_F0>1", "1F0", "0SEND_F1>1", "1F1"]


def test_a_copy_from_host_memory_is_the_reason() -> None:
    copy = (0, "host", "0RELOAD0", 1.5, 3.0)
    timeline = measured(1, (0, "compute", "0F0", 0.0, 1.0), copy, (0, "compute", "0B0", 3.25, 5.0))
    _, _, found = explained(parse_program(1, (0,), ("0F0 0RELOAD0 0B0",)), timeline, dag(1, []))
    waits = [(i.reason, i.start_s, i.end_s) for i in found.idle]
    assert ("copy", 1.5, 3.0) in waits and ("overhead", 3.0, 3.25) in waits
    assert [p.kind for p in found.path] == ["compute", "overhead", "copy", "overhead", "compute"]


def test_a_step_that_runs_the_program_twice() -> None:
    program, once, _ = step("1f1b", ranks=2, microbatches=2)
    later = [replace(e, start_s=e.start_s + once.step_s, end_s=e.end_s + once.step_s) for e in once.events]
    _, _, found = explained(program, replace(once, events=(*once.events, *later)), chain(2))
    assert [p.action for p in found.path].count("0F0") == 2


@pytest.mark.parametrize("clips", [False, True])
def test_the_sum_before_each_of_several_updates_is_the_reason(clips: bool) -> None:
    stages = dag(2, [(0, 1)], params={0: ("table",), 1: ("table",)})
    body = steady_step(registry.build("1f1b", stages, (0, 1), 12), 2)
    program = lower(body.unroll(4), stages, updates=Updates(policy="2bw", every=2), clips=clips)
    costs = tuple(replace(cost, tied_bytes={"table": 100}, step_s=0.5) for cost in equal_costs(2))
    timeline = simulate(program, stages, costs, alike(2, 10.0))
    found = explain_idle_time(program, timeline, stages)
    assert "overhead" not in found.by_reason and "overhead" not in {step.kind for step in found.path}
    waits = {idle.action: idle.reason for idle in found.idle if idle.action.endswith("STEP1")}
    assert waits == {"0STEP1": "reduce", "1STEP1": "reduce"}
    sums = [step.end_s - step.start_s for step in found.path if step.action.endswith("REDUCE3")]
    assert sums == [pytest.approx(10.0)]  # 100 bytes over two ranks at 10 a second


@pytest.mark.parametrize("shared", [False, True])
def test_a_norm_begins_behind_the_sums_of_all_ranks(shared: bool) -> None:
    """Rank 2 sums nothing, but its updates await the norm of gradients that ranks 0 and 1 sum for 10 s."""
    stages = dag(3, [(0, 1), (1, 2)], params={0: ("table",), 1: ("table",)})
    body = steady_step(registry.build("1f1b", stages, (0, 1, 2), 12), 3)
    costs = tuple(replace(cost, tied_bytes={"table": 100}, step_s=0.5) for cost in equal_costs(3))
    cluster = alike(3, 10.0)
    if shared:
        devices = tuple(replace(device, node=node) for node, device in enumerate(cluster.devices))
        cluster = replace(cluster, devices=devices, node_link=cluster.within_node)
    waited = {}
    for clips in (False, True):
        program = lower(body.unroll(4), stages, updates=Updates(policy="2bw", every=3), clips=clips)
        timeline = simulate(program, stages, costs, cluster)
        spans = {event.action: event for event in timeline.events}
        begun = max(spans[action].end_s for action in ("0REDUCE1", "1REDUCE1"))
        waited[clips] = spans["2STEP1"].start_s - begun
    assert waited[False] < 10.0 <= waited[True]


def test_nothing_and_a_rank_that_does_nothing() -> None:
    program = parse_program(1, (0, 1), ("0F0", "1F0"))
    assert explain_idle_time(program, measured(2), dag(2, [])).path == ()
    found = explain_idle_time(program, measured(2, (0, "compute", "0F0", 0.0, 2.0)), dag(2, []))
    assert [(i.rank, i.reason, i.duration_s) for i in found.idle] == [(1, "drain", 2.0)]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("latency_s", [0.0, 0.25])
def test_laws_hold_for_the_library(name: str, latency_s: float) -> None:
    program, timeline, found = step(name, microbatches=4, latency_s=latency_s)
    name_what_really_ended(program, timeline, found)
    assert "overhead" not in {*found.by_reason, *(p.kind for p in found.path)}


@examples(33, 100)
@given(dag_cases(), st.integers(0, 1000), st.integers(0, 3), st.integers(1, 3))
def test_laws_hold_for_random_graphs_and_times(case: Case, seed: int, latency_s: int, ahead: int) -> None:
    program, stages = lower(case.schedule, case.stages), case.stages
    costs, where = whole_costs(len(stages.stages), seed), alike(len(program.rows), 4.0, latency_s)
    timeline = simulate(program, stages, costs, where, receive_ahead=ahead)
    _, _, found = explained(program, timeline, stages)
    name_what_really_ended(program, timeline, found)
    assert not [p for p in found.path if p.kind == "overhead"]
    busy_s = sum(e.duration_s for e in timeline.events if e.stream == "compute")
    assert found.idle_s + busy_s == timeline.ranks * timeline.step_s


@examples(20, 60)
@given(st.data())
def test_laws_hold_for_disturbed_timelines(data: st.DataObject) -> None:
    """As measured: everything late by a little, clocks of ranks apart, sends not noted."""
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b"]))
    program, timeline, _ = step(name, ranks=3, microbatches=3)
    dice = Random(data.draw(st.integers(0, 10**6)))
    events: list[Event] = []
    for rank in range(3):
        at = float(data.draw(st.integers(0, 4)))
        for e in (e for e in timeline.events if e.rank == rank and e.stream == "compute"):
            start = at + dice.randint(0, 2)
            at = start + dice.randint(0, 6)
            events.append(replace(e, start_s=start, end_s=at))
    noisy = replace(timeline, source="measured", events=tuple(events))
    explained(program, noisy, registry.default_placement(name, 3)[0])


# Waits for links that several ranks share: the reason, and what held the link.


SECOND = Link(bandwidth_bytes_per_s=4.0)
"""A message of the tests below takes one second of it."""


def explained_on(program, stages, costs: Sequence[StageCost], where: Cluster) -> Explanation:
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
    assert "0SEND_F0>2 on rank 0, on the link that 1SEND_F0>3 waits for" in path_lines(found.path)[2]
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
    found = explained_on(program, dag(2, []), (cost, replace(cost, forward_s=1.25)), where)
    waits = [i for i in found.idle if i.rank == 1]
    assert [(i.reason, i.start_s, i.end_s, i.waiting, i.root) for i in waits] == [
        ("link", 1.25, 3.0, "1OFFLOAD0", "0OFFLOAD0"),
        ("copy", 3.0, 7.0, "", "0OFFLOAD0"),
    ]
    assert "1OFFLOAD0 waits for a shared link, which 0OFFLOAD0 of rank 0 holds" in sentence(waits[0])


def test_the_copy_of_a_reload_may_have_left_before_the_window() -> None:
    program = parse_program(2, (0,), ("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1",))
    copy = (0, "h2d", "0RELOAD0", 0.0, 2.0)
    timeline = measured(1, (0, "compute", "0F1", 0.0, 1.0), copy, (0, "compute", "0B0", 2.0, 3.0))
    _, _, found = explained(program, timeline, dag(1, []))
    assert [(i.reason, i.start_s, i.end_s) for i in found.idle] == [("copy", 1.0, 2.0)]


def test_a_message_that_waits_for_a_sum_names_it() -> None:
    where = nodes(0, 0, 1, 2, between_nodes=SECOND, node_link=SECOND)
    found = explained_on(*sum_beside_a_message(), where)
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
@settings(max_examples=120)
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
