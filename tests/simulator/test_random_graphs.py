"""Random stage graphs, placements and schedules: they simulate as an independent longest path says.

For edits of them see `tests/fuzz`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import networkx as nx
from edits import Case, dag_cases
from hypothesis import given, settings, strategies as st

from pipeloom.checks.schedules import check, check_program
from pipeloom.ir.action import StageAction, Transfer
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.schedule import Program
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering.passes import lower
from pipeloom.simulator.simulate import simulate

SEEDS = st.integers(0, 1000)


def costs_for(stages: int, seed: int) -> tuple[StageCost, ...]:
    """Uneven whole-number costs, so that sums of floats are exact."""
    dice = Random(seed)

    def number() -> int:
        return dice.randint(1, 9)

    return tuple(
        StageCost(
            forward_s=number(),
            backward_s=number(),
            input_grad_s=number(),
            weight_grad_s=number(),
            step_s=number(),
            residual_bytes=number(),
            carried_bytes=number(),
            static_bytes={"parameters": number()},
            transient_bytes={"F": number(), "STEP": number()},
            tied_bytes={"x": 8, "y": 4},
        )
        for _ in range(stages)
    )


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
    case = data.draw(dag_cases())
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
    case = data.draw(dag_cases())
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
@given(dag_cases())
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
