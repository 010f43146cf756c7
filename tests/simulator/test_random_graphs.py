"""Random stage graphs, placements, schedules, and edits of them.

Built ones pass every check and simulate as an independent longest path says; edited ones are refused exactly
when a graph search finds them broken.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.ir.action import Action, B, F, I, Kind, StageAction, Transfer, W
from pipeloom.ir.check import check, check_program
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering import lower
from pipeloom.simulator import simulate

SEEDS = st.integers(0, 1000)


@dataclass(frozen=True)
class Case:
    stages: StageGraph
    schedule: Schedule


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A DAG whose stages all reach the loss, in any numbering, on any placement."""
    count = draw(st.integers(1, 6))
    label = draw(st.permutations(range(count)))
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    some = st.frozensets(st.sampled_from(pairs)) if pairs else st.just(frozenset())
    chosen = draw(some)
    chosen |= {(i, count - 1) for i in range(count - 1) if not any(a == i for a, _ in chosen)}
    edges = [(label[a], label[b]) for a, b in sorted(chosen)]
    without = draw(st.frozensets(st.sampled_from(edges), max_size=3)) if edges else ()
    tied = draw(st.frozensets(st.tuples(st.integers(0, count - 1), st.sampled_from("xyz")), max_size=5))
    stages = dag(
        count, edges, loss_stage=label[count - 1], no_gradient=without,
        value_bytes=4 * draw(st.integers(1, 5)),
        params={s: tuple(sorted(name for at, name in tied if at == s)) for s in range(count)},
    )  # fmt: skip
    ranks = draw(st.integers(1, count))
    placement = tuple(draw(st.permutations([stage % ranks for stage in range(count)])))
    schedule = schedules.build(
        draw(st.sampled_from(["gpipe", "1f1b", "forward_only"])), stages, placement,
        draw(st.integers(1, 5)), split_backward=draw(st.booleans()),
    )  # fmt: skip
    return Case(stages, schedule)


def costs_for(stages: int, seed: int) -> tuple[StageCost, ...]:
    """Uneven whole-number costs, so that sums of floats are exact."""
    dice = Random(seed)

    def number() -> int:
        return dice.randint(1, 9)

    return tuple(
        StageCost(
            forward_s=number(), backward_s=number(), input_grad_s=number(), weight_grad_s=number(),
            step_s=number(), residual_bytes=number(), carried_bytes=number(),
            static_bytes={"parameters": number()}, transient_bytes={"F": number(), "STEP": number()},
            tied_bytes={"x": 8, "y": 4},
        )
        for _ in range(stages)
    )  # fmt: skip


def cluster(ranks: int) -> Cluster:
    nodes = [Device(name="any", memory_bytes=1, node=rank // 2) for rank in range(ranks)]
    near, far = Link(bandwidth_bytes_per_s=4.0), Link(bandwidth_bytes_per_s=2.0, latency_s=1.0)
    return Cluster(devices=tuple(nodes), within_node=near, between_nodes=far)


def finish_times(
    program: Program, stages: StageGraph, costs: tuple[StageCost, ...], links: Cluster, ahead: int
) -> dict[str, float]:
    """End of every action, message and wait: the longest path in one graph of all of them."""
    graph = nx.DiGraph()
    home = program.placement
    for rank, row in enumerate(program.rows):
        before = f"begin {rank}"
        graph.add_node(before, s=0.0)
        for step in row:
            s = 0.0
            if isinstance(step, StageAction):
                s = costs[step.stage].step_s
            elif not isinstance(step, Transfer):
                s = costs[step.stage].seconds(step.kind)
            graph.add_node(str(step), s=s)
            graph.add_edge(before, str(step))
            before = str(step)
    for (source, target), sends in program.messages.items():
        waits = [
            step
            for step in program.rows[target]
            if isinstance(step, Transfer) and not step.sends and home[step.peer] == source
        ]
        order = {send.other_end: index for index, send in enumerate(sends)}  # type: ignore[union-attr]
        for index, send in enumerate(sends):
            assert isinstance(send, Transfer)
            edge = (send.stage, send.peer) if send.kind == "SEND_F" else (send.peer, send.stage)
            values = stages.between[edge] if send.kind == "SEND_F" else stages.gradients(*edge)
            move = f"move {send}"
            graph.add_node(move, s=links.link(source, target).transfer_s(sum(v.bytes for v in values)))
            graph.add_edge(str(send), move)
            graph.add_edge(move, str(send.other_end))
            if index:
                graph.add_edge(f"move {sends[index - 1]}", move)
            # Posted when enough earlier messages are received, or when this or a later one is waited for.
            received = index + 1 - ahead
            wait = next(i for i, wait in enumerate(waits) if order[wait] >= index)
            if 0 < received <= wait:
                graph.add_edge(str(waits[received - 1]), move)
            elif received > wait:
                place = program.rows[target].index(waits[wait])
                graph.add_edge(str(program.rows[target][place - 1]) if place else f"begin {target}", move)
    end: dict[str, float] = {}
    for node in nx.topological_sort(graph):
        start = max((end[p] for p in graph.predecessors(node)), default=0.0)
        end[node] = start + graph.nodes[node]["s"]
    return end


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_built_schedules_pass_and_simulate_as_the_longest_path(data: st.DataObject) -> None:
    case = data.draw(cases())
    # No ties here: sums are timed in a test of their own.
    stages = replace(case.stages, params=((),) * len(case.stages.stages))
    check(case.schedule, stages)
    program = lower(case.schedule, stages)
    check_program(program, stages)
    costs = costs_for(len(stages.stages), data.draw(SEEDS))
    ahead = data.draw(st.integers(1, 3))
    links = cluster(len(program.rows))
    timeline = simulate(program, stages, costs, links, receive_ahead=ahead)
    expected = finish_times(program, stages, costs, links, ahead)
    for event in timeline.events:
        if event.stream == "compute":
            assert event.end_s == expected[event.action], event
        elif event.stream == "send":
            assert event.end_s == expected[f"move {event.action}"], event
    assert timeline.step_s == max(expected.values())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_memory_returns_to_what_it_was_and_the_parts_make_the_peak(data: st.DataObject) -> None:
    case = data.draw(cases())
    program = lower(case.schedule, case.stages)
    costs = costs_for(len(case.stages.stages), data.draw(SEEDS))
    timeline = simulate(program, case.stages, costs, cluster(len(program.rows)))
    for curve, parts in zip(timeline.memory, timeline.peaks, strict=True):
        own = [c for c, rank in zip(costs, program.placement, strict=True) if rank == curve.rank]
        static = sum(c.static_bytes["parameters"] for c in own)
        assert curve.sizes[0] >= static
        assert curve.sizes[-1] == static
        assert min(curve.sizes) == static
        assert curve.peak_bytes == sum(parts.values())
        assert parts["parameters"] == static
        assert list(curve.times_s) == sorted(curve.times_s)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_events_are_complete_and_do_not_overlap(case: Case) -> None:
    program = lower(case.schedule, case.stages)
    costs = tuple(
        StageCost(forward_s=1.0, backward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0, step_s=0.5)
        for _ in case.stages.stages
    )
    timeline = simulate(program, case.stages, costs, cluster(len(program.rows)))
    for rank, row in enumerate(program.rows):
        mine = [e for e in timeline.events if e.rank == rank]
        busy = sorted((e for e in mine if e.stream in ("compute", "recv")), key=lambda e: e.start_s)
        assert all(a.end_s <= b.start_s for a, b in zip(busy, busy[1:], strict=False))
        seen = [e.action for e in mine if e.stream == "compute"]
        wanted = [str(s) for s in row if not isinstance(s, Transfer) and s.kind != "REDUCE"]
        assert seen == wanted


def valid(schedule: Schedule, stages: StageGraph) -> bool:
    """By counting and a search for cycles in the graph of rows and needs, without the code under test."""
    count = Counter(a for row in schedule.rows for a in row)
    training = any(a.kind in (B, I, W) for a in count)
    wanted = (["B", "F"], ["F", "I", "W"]) if training else (["F"],)
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            kinds = [k for k in (F, B, I, W) for _ in range(count.pop(Action(stage, k, m), 0))]
            if sorted(kinds) not in wanted:
                return False
    if count or any(schedule.placement[a.stage] != r for r, row in enumerate(schedule.rows) for a in row):
        return False
    graph = nx.DiGraph()
    for m in range(schedule.microbatches):
        for stage in range(schedule.stages):
            graph.add_edges_from([((stage, m, "F"), (stage, m, "G")), ((stage, m, "G"), (stage, m, "W"))])
        for a, b in stages.between:
            graph.add_edge((a, m, "F"), (b, m, "F"))
            if stages.gradients(a, b):
                graph.add_edge((b, m, "G"), (a, m, "G"))
    for row in schedule.rows:
        nx.add_path(graph, [(a.stage, a.microbatch, {B: "G", I: "G"}.get(a.kind, a.kind)) for a in row])
    return bool(nx.is_directed_acyclic_graph(graph))


def edit(draw: st.DrawFn, rows: tuple[tuple[object, ...], ...]) -> tuple[tuple[object, ...], ...]:
    """Swap, drop, repeat, move or change one thing somewhere."""
    table = [list(row) for row in rows]
    places = [(r, i) for r, row in enumerate(table) for i in range(len(row))]
    if not places:
        return rows
    r, i = draw(st.sampled_from(places))
    what = draw(st.sampled_from(["swap", "next", "next", "drop", "repeat", "move", "change"]))
    if what == "swap":
        q, j = draw(st.sampled_from(places))
        table[r][i], table[q][j] = table[q][j], table[r][i]
    elif what == "next" and i + 1 < len(table[r]):
        table[r][i], table[r][i + 1] = table[r][i + 1], table[r][i]
    elif what == "drop":
        del table[r][i]
    elif what == "repeat":
        table[r].insert(draw(st.integers(0, len(table[r]))), table[r][i])
    elif what == "move":
        step = table[r].pop(i)
        q = draw(st.integers(0, len(table) - 1))
        table[q].insert(draw(st.integers(0, len(table[q]))), step)
    elif what == "change":
        step = table[r][i]
        field = draw(st.sampled_from(["stage", "microbatch", "kind", "peer"]))
        if field == "kind":
            kinds = [F, B, I, W] if not isinstance(step, StageAction) else [Kind("STEP"), Kind("REDUCE")]
            if isinstance(step, Transfer):
                kinds = [Kind("SEND_F"), Kind("RECV_F"), Kind("SEND_B"), Kind("RECV_B")]
            table[r][i] = replace(step, kind=draw(st.sampled_from(kinds)))  # type: ignore[type-var]
        elif hasattr(step, field):
            table[r][i] = replace(step, **{field: draw(st.integers(0, 6))})  # type: ignore[type-var]
    return tuple(tuple(row) for row in table)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_edited_schedules_are_refused_exactly_when_broken(data: st.DataObject) -> None:
    case = data.draw(cases())
    schedule = case.schedule
    for _ in range(data.draw(st.integers(1, 3))):
        schedule = replace(schedule, rows=edit(data.draw, schedule.rows))  # type: ignore[arg-type]
    in_range = all(
        a.stage < schedule.stages and a.microbatch < schedule.microbatches
        for row in schedule.rows
        for a in row
    )
    fine = in_range and valid(schedule, case.stages)
    try:
        check(schedule, case.stages)
    except ScheduleError as error:
        assert not fine, error
        assert error.hint
    else:
        assert fine
        program = lower(schedule, case.stages)
        simulate(program, case.stages, costs_for(schedule.stages, 0), cluster(schedule.ranks))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_edited_programs_run_or_are_refused(data: st.DataObject) -> None:
    case = data.draw(cases())
    program = lower(case.schedule, case.stages)
    for _ in range(data.draw(st.integers(1, 3))):
        program = replace(program, rows=edit(data.draw, program.rows))  # type: ignore[arg-type]
    try:
        check_program(program, case.stages)
    except ScheduleError as error:
        assert error.hint
    else:
        costs = costs_for(len(program.placement), 0)
        timeline = simulate(program, case.stages, costs, cluster(len(program.rows)))
        assert len(timeline.events) >= sum(isinstance(s, Action) for row in program.rows for s in row)
