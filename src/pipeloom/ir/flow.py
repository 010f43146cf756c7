"""Flow: which stage waits for which, in both directions, derived once from a StageGraph.

A forward needs the outputs of every stage it reads from. A backward needs gradients from only those
readers whose edge has a value with a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from .errors import ScheduleError
from .stages import StageGraph, dag as dag


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Neighbours of each stage; every tuple is indexed by stage and sorted in topological order.

    reads_from, read_by: along all edges, for F.
    gradients_from, gradients_to: along the edges whose gradients come back, for B and I.
    order: all stages, each after the stages it reads from.
    shards: stage -> the other stages that are the same stage on other ranks.
    """

    order: tuple[int, ...]
    reads_from: tuple[tuple[int, ...], ...]
    read_by: tuple[tuple[int, ...], ...]
    gradients_from: tuple[tuple[int, ...], ...]
    gradients_to: tuple[tuple[int, ...], ...]
    shards: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def flow_of(stages: StageGraph) -> Flow:
    """Derive the neighbours, once for each graph.

    >>> flow = flow_of(dag(3, [(0, 1), (0, 2), (1, 2)], no_gradient=[(0, 2)]))
    >>> flow.read_by[0], flow.gradients_from[0]
    ((1, 2), (1,))
    """
    known: Flow | None = stages.__dict__.get("_flow")
    if known is None:
        known = stages.__dict__["_flow"] = _derived(stages)
    return known


def _derived(stages: StageGraph) -> Flow:
    edges = sorted(stages.between)
    count = len(stages.stages)
    order = _topological(count, edges)
    place = {stage: position for position, stage in enumerate(order)}
    reads_from: list[list[int]] = [[] for _ in range(count)]
    read_by: list[list[int]] = [[] for _ in range(count)]
    gradients_from: list[list[int]] = [[] for _ in range(count)]
    gradients_to: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        reads_from[target].append(source)
        read_by[source].append(target)
        if stages.gradients(source, target):
            gradients_from[source].append(target)
            gradients_to[target].append(source)

    def in_order(neighbours: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(row, key=place.__getitem__)) for row in neighbours)

    return Flow(
        order=order,
        reads_from=in_order(reads_from),
        read_by=in_order(read_by),
        gradients_from=in_order(gradients_from),
        gradients_to=in_order(gradients_to),
        shards={s: tuple(o for o in group if o != s) for group in stages.shards for s in group},
    )


def _topological(count: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    before: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for source, target in edges:
        before[target].append(source)
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " -> ".join(map(str, error.args[1]))
        raise ScheduleError(
            f"stages need each other's values in a circle: {circle}",
            hint="cut the model so that values flow one way",
        ) from None
    order: list[int] = []
    while sorter:
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return tuple(order)
