"""Idle reasons and critical paths: by hand, and as laws for random graphs and for the library."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.explanation import REASONS, Explanation, Idle
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.timeline import Event, Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.idle_time.explain import explain_idle_time
from pipeloom.simulator.simulate import simulate


def links(ranks: int, latency_s: float = 0.0, bytes_per_s: float = float("inf")) -> Cluster:
    link = Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Cluster(devices=(Device(name="any", memory_bytes=1),) * ranks, within_node=link)


def step(
    name: str,
    ranks: int = 4,
    microbatches: int = 8,
    *,
    costs: tuple[StageCost, ...] = (),
    latency_s: float = 0.0,
) -> tuple[Program, Timeline, Explanation]:
    stages, placement = registry.default_placement(name, ranks)
    built = registry.build(name, stages, placement, microbatches)
    program = lower(built, stages)
    timeline = simulate(program, stages, costs or equal_costs(len(placement)), links(ranks, latency_s))
    return program, timeline, explain_idle_time(program, timeline, stages)


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
    assert all(p.duration_s > 0 for p in found.path)


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
    waits = [i for i in found.idle if i.action and computed[i.action].start_s == i.end_s and i.waits_for]
    for wait in waits:
        maker = computed[wait.waits_for]
        assert maker.rank == wait.on_rank != wait.rank
        stage = wait.action.split("F")[0].split("B")[0].split("I")[0]
        stages = {stage, str(second.get(wait.action, stage))}
        sender = wait.waits_for.split("F")[0].split("B")[0].split("I")[0]
        assert maker.end_s == wait.end_s or arrived & {(sender, one, wait.end_s) for one in stages}
    for wait in found.idle:
        if wait.root in computed:
            assert computed[wait.root].rank == wait.root_rank
            assert computed[wait.root].end_s <= computed[wait.action].start_s
        else:
            assert wait.root == "" or "SEND" in wait.root


def test_1f1b_by_hand() -> None:
    _, timeline, found = step("1f1b")
    obey_the_laws(timeline, found)
    assert found.by_reason == {"fill": 12.0, "drain": 12.0, "warm-up": 6.0, "order": 6.0}
    first = next(i for i in found.idle if i.rank == 0)
    assert first == Idle(
        rank=0, start_s=4.0, end_s=10.0, reason="fill", action="0B0", waits_for="1B0", on_rank=1
    )
    late = next(i for i in found.idle if i.rank == 0 and i.reason == "order")
    assert (late.action, late.waits_for, late.root, late.root_rank) == ("0B5", "1B5", "1F7", 1)
    words = " ".join(p.action for p in found.path)
    assert words.startswith("0F0 1F0 2F0 3F0 3B0 3F1 3B1") and words.endswith("3F7 3B7 2B7 1B7 0B7")


def test_a_slow_rank_is_named_and_gets_no_more_than_its_share() -> None:
    cost = equal_costs(1)[0]
    costs = (cost, cost, cost.slowed(2.0), cost)
    _, timeline, found = step("1f1b", microbatches=32, costs=costs)
    obey_the_laws(timeline, found)
    for rank in (0, 1, 3):
        mine = [i for i in found.idle if i.rank == rank and i.reason == "imbalance"]
        assert {i.root_rank for i in mine} == {2}
        assert 0.9 * 96 <= sum(i.duration_s for i in mine) <= 96
    assert not [i for i in found.idle if i.rank == 2 and i.reason == "imbalance"]
    on_slow = sum(p.duration_s for p in found.path if p.rank == 2)
    assert on_slow >= 31 * 6.0


def test_transfers_are_told_from_waiting_for_work() -> None:
    _, timeline, found = step("forward_only", ranks=2, microbatches=1, latency_s=2.5)
    assert [(p.kind, p.action, p.rank, p.to_rank) for p in found.path] == [
        ("compute", "0F0", 0, -1),
        ("transfer", "0SEND_F0>1", 0, 1),
        ("compute", "1F0", 1, -1),
    ]
    _, timeline, found = step("1f1b", ranks=2, microbatches=4, latency_s=2.5)
    obey_the_laws(timeline, found)
    first = [(i.reason, i.start_s, i.end_s) for i in found.idle if i.rank == 0][:3]
    assert first == [("transfer", 2.0, 3.5), ("fill", 3.5, 6.5), ("transfer", 6.5, 9.0)]


def test_a_busy_link_is_the_reason() -> None:
    rows = ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1")
    program = parse_program(2, (0, 1), rows)
    timeline = simulate(program, chain(2), equal_costs(2), links(2, 5.0))
    found = explain_idle_time(program, timeline, chain(2))
    wait = found.idle[-1]
    assert (wait.reason, wait.start_s, wait.end_s, wait.root) == ("transfer", 7.0, 11.0, "0SEND_F0>1")
    assert [p.action for p in found.path] == ["0F0", "0SEND_F0>1", "0SEND_F1>1", "1F1"]


def test_waits_for_the_sum_of_tied_gradients() -> None:
    stages = dag(2, [(0, 1)], params={0: ("x",), 1: ("x",)})
    program = lower(registry.build("1f1b", stages, (0, 1), 2), stages)
    costs = tuple(replace(c, step_s=1.0, tied_bytes={"x": 8}) for c in equal_costs(2))
    timeline = simulate(program, stages, costs, links(2, bytes_per_s=2.0))
    found = explain_idle_time(program, timeline, stages)
    obey_the_laws(timeline, found)
    last = [i for i in found.idle if i.rank == 1][-1]
    assert (last.reason, last.action) == ("reduce", "1STEP")
    assert [p.kind for p in found.path][-2:] == ["reduce", "compute"]


def test_a_measured_step_has_overhead_and_no_send_events() -> None:
    rows = ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1")
    program = parse_program(2, (0, 1), rows)
    at = (
        (0, "compute", "0F0", 0.25, 1.0),
        (0, "compute", "0F1", 1.25, 2.0),
        (0, "recv", "END", 2.0, 4.5),
        (1, "recv", "1RECV_F0<0", 0.0, 1.5),
        (1, "compute", "1F0", 1.75, 3.0),
        (1, "recv", "1RECV_F1<0", 3.0, 3.25),
        (1, "compute", "1F1", 3.5, 4.5),
    )
    events = tuple(Event(rank=r, stream=s, action=a, start_s=b, end_s=e) for r, s, a, b, e in at)
    timeline = Timeline(source="measured", ranks=2, events=events)
    found = explain_idle_time(program, timeline, chain(2))
    obey_the_laws(timeline, found)
    assert [(i.rank, i.reason, i.start_s, i.end_s) for i in found.idle] == [
        (0, "warm-up", 0.0, 0.25),
        (0, "overhead", 1.0, 1.25),
        (0, "drain", 2.0, 4.5),
        (1, "warm-up", 0.0, 1.75),
        (1, "transfer", 3.0, 3.25),
        (1, "overhead", 3.25, 3.5),
    ]
    assert [p.action for p in found.path if p.kind != "overhead"] == [
        "0F0",
        "0SEND_F0>1",
        "1F0",
        "0SEND_F1>1",
        "1F1",
    ]


def test_a_copy_from_host_memory_is_the_reason() -> None:
    at = (("compute", "0F0", 0.0, 1.0), ("host", "0RELOAD0", 1.5, 3.0), ("compute", "0B0", 3.25, 5.0))
    events = tuple(Event(rank=0, stream=s, action=a, start_s=b, end_s=e) for s, a, b, e in at)
    timeline = Timeline(source="measured", ranks=1, events=events)
    found = explain_idle_time(parse_program(1, (0,), ("0F0 0RELOAD0 0B0",)), timeline, dag(1, []))
    obey_the_laws(timeline, found)
    assert [(i.reason, i.start_s, i.end_s) for i in found.idle if i.duration_s >= 0.25][-1] == (
        "overhead",
        3.0,
        3.25,
    )
    assert ("copy", 1.5, 3.0) in [(i.reason, i.start_s, i.end_s) for i in found.idle]
    assert [p.kind for p in found.path] == ["compute", "overhead", "copy", "overhead", "compute"]


def test_a_step_that_runs_the_program_twice() -> None:
    program, once, _ = step("1f1b", ranks=2, microbatches=2)
    later = [replace(e, start_s=e.start_s + once.step_s, end_s=e.end_s + once.step_s) for e in once.events]
    twice = replace(once, events=(*once.events, *later))
    found = explain_idle_time(program, twice, chain(2))
    obey_the_laws(twice, found)
    assert [p.action for p in found.path].count("0F0") == 2


def test_nothing_and_a_rank_that_does_nothing() -> None:
    program = parse_program(1, (0, 1), ("0F0", "1F0"))
    nothing = Timeline(source="measured", ranks=2, events=())
    assert explain_idle_time(program, nothing, dag(2, [])).path == ()
    one = Event(rank=0, stream="compute", action="0F0", start_s=0.0, end_s=2.0)
    found = explain_idle_time(program, replace(nothing, events=(one,)), dag(2, []))
    assert [(i.rank, i.reason, i.duration_s) for i in found.idle] == [(1, "drain", 2.0)]


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("latency_s", [0.0, 0.25])
def test_laws_hold_for_the_library(name: str, latency_s: float) -> None:
    program, timeline, found = step(name, microbatches=4, latency_s=latency_s)
    obey_the_laws(timeline, found)
    name_what_really_ended(program, timeline, found)
    assert "overhead" not in found.by_reason
    assert not [p for p in found.path if p.kind == "overhead"]


def uneven(stages: int, seed: int) -> tuple[StageCost, ...]:
    """Whole numbers, so that sums of floats are exact."""
    dice = Random(seed)
    return tuple(
        StageCost(
            forward_s=dice.randint(1, 9),
            backward_s=dice.randint(1, 9),
            input_grad_s=dice.randint(1, 9),
            weight_grad_s=dice.randint(0, 9),
            step_s=dice.randint(0, 3),
            tied_bytes={"x": 8, "y": 4},
        )
        for _ in range(stages)
    )


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    count = draw(st.integers(1, 6))
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    chosen = draw(st.frozensets(st.sampled_from(pairs))) if pairs else frozenset()
    chosen |= {(i, count - 1) for i in range(count - 1) if not any(a == i for a, _ in chosen)}
    tied = draw(st.frozensets(st.tuples(st.integers(0, count - 1), st.sampled_from("xy")), max_size=4))
    params = {s: tuple(sorted(name for at, name in tied if at == s)) for s in range(count)}
    return dag(count, sorted(chosen), params=params, value_bytes=4 * draw(st.integers(1, 5)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_laws_hold_for_random_graphs_and_times(data: st.DataObject) -> None:
    stages = data.draw(graphs())
    count = len(stages.stages)
    ranks = data.draw(st.integers(1, count))
    placement = tuple(data.draw(st.permutations([s % ranks for s in range(count)])))
    built = registry.build(
        data.draw(st.sampled_from(["gpipe", "1f1b", "forward_only"])),
        stages,
        placement,
        data.draw(st.integers(1, 5)),
        split_backward=data.draw(st.booleans()),
    )
    program = lower(built, stages)
    timeline = simulate(
        program,
        stages,
        uneven(count, data.draw(st.integers(0, 1000))),
        links(ranks, data.draw(st.integers(0, 3)), bytes_per_s=4.0),
        receive_ahead=data.draw(st.integers(1, 3)),
    )
    found = explain_idle_time(program, timeline, stages)
    obey_the_laws(timeline, found)
    name_what_really_ended(program, timeline, found)
    assert not [p for p in found.path if p.kind == "overhead"]
    busy_s = sum(e.duration_s for e in timeline.events if e.stream == "compute")
    assert found.idle_s + busy_s == ranks * timeline.step_s


@settings(max_examples=100, deadline=None)
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
    stages, _ = registry.default_placement(name, 3)
    obey_the_laws(noisy, explain_idle_time(program, noisy, stages))
