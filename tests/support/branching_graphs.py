"""Random op graphs: chains, series-parallel graphs, others; and every cut of a small one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.graph import Op, OpGraph, Parameter, Value
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.planner.branches import BranchOrdered
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.make_plan import make_plan
from pipeloom.planner.refusals import least_share
from pipeloom.planner.registry import PLANNERS
from pipeloom.planner.request import PlanOptions, Request

Reads = list[list[int]]
"""Of each op those that it reads, all earlier ones."""

KINDS = ("chain", "series-parallel", "any")


def reads_of(dice: random.Random, ops: int, kind: str) -> Reads:
    """A graph of so many ops, the last of which makes the loss."""
    if kind == "chain":
        return [[i - 1] if i else [] for i in range(ops)]
    if kind == "any":
        reads = [sorted(dice.sample(range(i), min(i, dice.randint(1, 2)))) for i in range(ops)]
        unread = set(range(ops - 1)) - {i for row in reads for i in row}
        reads[-1] = sorted({*reads[-1], *unread})
        return reads
    reads = [[]]
    heads = _grow(dice, reads, [0], ops - 2)
    reads.append(sorted(set(heads)))
    return reads


def _grow(dice: random.Random, reads: Reads, heads: list[int], ops: int) -> list[int]:
    """Add so many ops behind heads, as a series or as branches; returns the ops that nothing reads yet."""
    if ops <= 0:
        return heads
    if ops == 1 or dice.random() < 0.4:
        reads.append(sorted(set(heads)))
        return _grow(dice, reads, [len(reads) - 1], ops - 1)
    first = dice.randint(1, ops - 1)
    left, right = _grow(dice, reads, heads, first), _grow(dice, reads, heads, ops - first)
    return sorted({*left, *right})


def random_graph(seed: int, ops: int, kind: str) -> tuple[OpGraph, Profile]:
    """A graph with trainable ops of unequal times, in a world of bytes per second."""
    dice = random.Random(seed)
    reads = reads_of(dice, ops, kind)
    values = [
        Value(name=f"v{i}", shape=(dice.randint(1, 30),), dtype="float32", needs_grad=True)
        for i in range(ops)
    ]
    made = tuple(
        Op(
            name=f"op{i}",
            target="aten.some.default",
            inputs=tuple(f"v{j}" for j in reads[i]) or ("x",),
            outputs=(values[i],),
            params=(f"p{i}",),
        )
        for i in range(ops)
    )
    graph = OpGraph(
        name=f"{kind} {seed}",
        inputs=(Value(name="x", shape=(4,), dtype="float32"),),
        ops=made,
        parameters=tuple(
            Parameter(name=f"p{i}", shape=(dice.randint(1, 20),), dtype="float32") for i in range(ops)
        ),
        buffers=(),
        loss=f"v{ops - 1}",
    )
    costs = {
        op.name: OpCost(
            forward_s=dice.randint(1, 9),
            input_grad_s=dice.randint(1, 9),
            weight_grad_s=dice.randint(1, 9),
            saves=(op.outputs[0].name,),
        )
        for op in made
    }
    return graph, Profile(device="d", source="random", graph=graph.fingerprint, batch=(), costs=costs)


def cluster_of(stages: int, memory: int = 1 << 40, bytes_per_s: float = 100.0) -> Cluster:
    devices = tuple(Device(name="d", memory_bytes=memory) for _ in range(stages))
    return Cluster(devices=devices, within_node=Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0))


def request_for(
    graph: OpGraph,
    profile: Profile,
    stages: int,
    *,
    slack: float | None = None,
    schedule: str = "1f1b",
    bytes_per_s: float = 100.0,
) -> Request:
    """To cut a graph. slack: caps as multiples of the least with which some cut into a chain fits."""
    cluster = cluster_of(stages, bytes_per_s=bytes_per_s)
    options = PlanOptions(schedule=schedule, microbatches=2 * stages, planner="graphpipe", treatments=())
    request = Request(graph, profile, cluster, options, PLANNERS["graphpipe"])
    if slack is None:
        return request
    memory = int(least_share(request.search())[0] * cluster.devices[0].memory_bytes * slack) + 1
    return replace(request, cluster=cluster_of(stages, memory, bytes_per_s))


def convex_partitions(graph: OpGraph, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to share out the ops to so many stages without a circle between these, once: of each op its
    stage, a stage after those that it reads, of several that are ready first the one with the first op."""
    reads = reads_within(graph)
    for groups in groupings(len(reads), stages):
        before: list[set[int]] = [set() for _ in range(stages)]
        for op, row in enumerate(reads):
            before[groups[op]] |= {groups[other] for other in row} - {groups[op]}
        order: list[int] = []
        while ready := [g for g in range(stages) if g not in order and before[g] <= set(order)]:
            order.append(ready[0])
        if len(order) == stages:
            yield tuple(order.index(group) for group in groups)


def groupings(things: int, groups: int) -> Iterator[tuple[int, ...]]:
    """Every way to put so many things into so many non-empty groups, numbered by their first ones.

    >>> list(groupings(3, 2))
    [(0, 0, 1), (0, 1, 0), (0, 1, 1)]
    """
    if not 0 < groups <= things:
        if things == groups == 0:
            yield ()
        return
    for row in groupings(things - 1, groups - 1):
        yield (*row, groups - 1)
    for row in groupings(things - 1, groups):
        yield from ((*row, group) for group in range(groups))


def reads_within(graph: OpGraph) -> Reads:
    return [[int(value[1:]) for value in op.inputs if value != "x"] for op in graph.ops]


def least_step_s(request: Request, assigned: tuple[int, ...], stages: int) -> float:
    """Seconds that no step of 1f1b with these stages is shorter than.

    A stage begins when the first micro-batch has come to it, and computes for all of them; then the last
    gradient goes back from it. So does each link: its messages of all micro-batches come one after another.
    """
    count, graph = request.microbatches, request.graph
    costs = [request.profile.costs[op.name] for op in graph.ops]
    bytes_per_s = request.cluster.within_node.bandwidth_bytes_per_s
    forward, backward, before = [0.0] * stages, [0.0] * stages, [0.0] * stages
    sent: dict[tuple[int, int], set[int]] = {}
    for op, row in enumerate(reads_within(graph)):
        forward[assigned[op]] += costs[op].forward_s
        backward[assigned[op]] += costs[op].backward_s
        for other in row:
            if assigned[other] != assigned[op]:
                sent.setdefault((assigned[other], assigned[op]), set()).add(other)
    messages = {
        edge: sum(graph.value[f"v{op}"].bytes for op in ops) / bytes_per_s for edge, ops in sent.items()
    }
    # Seconds before the first forward of a stage begins and, alike, after its last backward has ended.
    after = [0.0] * stages
    for (source, target), message_s in sorted(messages.items(), key=lambda item: item[0][1]):
        before[target] = max(before[target], before[source] + forward[source] + message_s)
        after[target] = max(after[target], message_s + backward[source] + after[source])
    bounds = [before[s] + count * (forward[s] + backward[s]) + after[s] for s in range(stages)]
    for (source, target), message_s in messages.items():
        there = before[source] + forward[source] + count * message_s + forward[target]
        bounds.append(there + backward[target] + message_s + backward[source] + after[source])
    return max(bounds)


def candidate_of(request: Request, assigned: tuple[int, ...], stages: int) -> Candidate:
    """A partition as a candidate: in the op order that has its stages one after another."""
    order = tuple(sorted(range(len(assigned)), key=lambda i: (assigned[i], i)))
    search = replace(request.search(BranchOrdered(order, (0,))), by_depth=True)
    cuts = [0]
    for stage in range(stages):
        cuts.append(cuts[-1] + assigned.count(stage))
    return Candidate(request, search, tuple(cuts))


def best_of_all(request: Request, stages: int, below: float = float("inf")) -> float:
    """Seconds of the simulated step of the best partition that keeps its caps, over all there are, with as
    many micro-batches in flight as the depth asks for and with more; `below` if none is faster than that."""
    best = below
    bounds = sorted(
        (least_step_s(request, assigned, stages), assigned)
        for assigned in convex_partitions(request.graph, stages)
    )
    for bound, assigned in bounds:
        if bound >= best:
            break
        for slack in range(stages):
            found = candidate_of(replace(request, slack=slack), assigned, stages)
            if found.fits and found.tighter() is None:
                best = min(best, found.timeline.step_s)
            if found.depth == stages:
                break  # no more can be in flight
    return best


def plan_of(request: Request, strategy: str = "graphpipe", **options) -> Plan:
    """The plan of a request by a planner. Raises: InfeasibleError if nothing fits."""
    return make_plan(
        request.graph,
        request.profile,
        request.cluster,
        request.options,
        ranks=len(request.cluster.devices),
        planner=strategy,
        explained=False,
        **options,
    )


def step_s(request: Request, strategy: str = "graphpipe", **options) -> float:
    """Seconds of the planned step; infinite if nothing fits."""
    try:
        return plan_of(request, strategy, **options).predicted_step_s
    except InfeasibleError:
        return float("inf")
