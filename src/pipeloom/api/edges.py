"""Stage graphs written as edges, for schedules without a model: "0-1 1-4 2-3 3-4"."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.errors import ScheduleError
from ..ir.flow import dag, flow_of
from ..ir.stages import StageGraph
from ..schedules import registry

Edges = tuple[tuple[int, int], ...]
"""(from stage, to stage) of each message."""


def graph_of_edges(edges: Edges) -> StageGraph:
    """The stages that edges name, which are numbered from 0 without gaps, with one message per edge.

    Raises: ScheduleError if a number is missing, an edge stands twice, or stages wait in a circle.

    >>> graph_of_edges(((0, 1), (1, 4), (2, 3), (3, 4))).predecessors[4]
    (1, 3)
    """
    named = {stage for edge in edges for stage in edge}
    if gaps := sorted(set(range(max(named) + 1)) - named):
        raise ScheduleError(
            f"no edge names stage {gaps[0]}", hint="number the stages from 0 without gaps, each in an edge"
        )
    if twice := [edge for edge in dict.fromkeys(edges) if edges.count(edge) > 1]:
        source, target = twice[0]
        raise ScheduleError(f"the edge {source}-{target} is given twice", hint="give each edge once")
    count = len(named)
    ends = named - {source for source, _ in edges} or named
    graph = dag(count, edges, loss_stage=max(ends))
    flow_of(graph)  # refuses a circle
    return graph


def placed(name: str, edges: Edges) -> tuple[StageGraph, tuple[int, ...]]:
    """The graph and a placement for a schedule of the library: each stage on the rank of its number.

    Raises: ScheduleError if the schedule has several stages on a rank, or brings its own stages.
    """
    place = registry.entry(name).place
    if place == "table":
        raise ScheduleError(
            f"{name} has stages of its own, --edges gives it others",
            hint="leave --edges out; a file of rows is held against edges by `pipeloom schedule check`",
        )
    if place != "line":
        raise ScheduleError(
            f"{name} runs several stages on each rank, --edges gives each stage a rank of its own",
            hint="use a schedule with one stage per rank, as 1f1b or zb_h1; `check` reads rows of any "
            "placement for a graph",
        )
    graph = graph_of_edges(edges)
    return graph, tuple(range(len(graph.stages)))


def between(stages: StageGraph) -> list[tuple[int, int]]:
    """The edges of the first replica, as they were given; a chain's from front to back."""
    return list(dict.fromkeys((stages.origin(c.source), stages.origin(c.target)) for c in stages.crossings))


def seconds_by_edge(stages: StageGraph, transfer_s: Sequence[float]) -> dict[tuple[int, int], float]:
    """(stage, stage), in both directions -> seconds of a message between them, replicas and shards too."""
    first = dict(zip(between(stages), transfer_s, strict=True))
    given = {
        (c.source, c.target): first[stages.origin(c.source), stages.origin(c.target)]
        for c in stages.crossings
    }
    return given | {(target, source): seconds for (source, target), seconds in given.items()}
