"""The stage graph as a drawing: a box per stage with its seconds, a line per edge with its bytes, as SVG.

Stages lie in columns, each after all that it reads. An edge over several columns has a bend in each of them,
between boxes. In a column, boxes and bends are in the order of what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import fmean as mean
from typing import TypeAlias

from ..ir.stages import StageGraph
from ..ir.text import format_bytes
from .comparisons import Both, StageRow, stage_figures

Point: TypeAlias = tuple[float, float]

# Pixels across and down: of a box, and between boxes of two columns and of one.
BOX, GAP = (132, 62), (108, 34)


@dataclass(frozen=True, kw_only=True)
class StageEdge:
    """What one stage sends to another per micro-batch: bytes of values, and of gradients that come back."""

    source: int
    target: int
    bytes: int
    gradient_bytes: int

    @property
    def text(self) -> str:
        """
        >>> StageEdge(source=0, target=1, bytes=2048, gradient_bytes=0).text
        '2.0 KiB, no gradient'
        """
        there, back = format_bytes(self.bytes), format_bytes(self.gradient_bytes)
        if self.gradient_bytes == self.bytes:
            return there
        return f"{there}, {f'back {back}' if self.gradient_bytes else 'no gradient'}"


@dataclass(frozen=True, kw_only=True)
class Box:
    """x, y: its upper left corner."""

    stage: int
    x: float
    y: float
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EdgeLine:
    """path: of SVG.  x, y: where its text stands."""

    edge: StageEdge
    path: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class StageDrawing:
    width: float
    height: float
    boxes: tuple[Box, ...]
    lines: tuple[EdgeLine, ...]
    box: tuple[int, int] = BOX


def stage_edges(stages: StageGraph) -> tuple[StageEdge, ...]:
    """The edges of a stage graph, of one replica.

    >>> from pipeloom.ir.stages import chain
    >>> [(e.source, e.target, e.bytes, e.gradient_bytes) for e in stage_edges(chain(2))]
    [(0, 1, 4, 4)]
    """
    count = len(stages.stages) // stages.replicas
    return tuple(
        StageEdge(
            source=source,
            target=target,
            bytes=sum(value.bytes for value in values),
            gradient_bytes=sum(value.bytes for value in stages.gradients(source, target)),
        )
        for (source, target), values in sorted(stages.between.items())
        if max(source, target) < count
    )


def draw_stages(stages: Sequence[StageRow], edges: Sequence[StageEdge], both: Both) -> StageDrawing:
    """both: of which the boxes have seconds."""
    at, bends = _places(len(stages), [(edge.source, edge.target) for edge in edges])
    every = [*at, *(point for route in bends.values() for point in route)]
    seconds = stage_figures(stages, both)
    wide, high = BOX
    boxes = []
    for row, (x, y) in zip(stages, at, strict=True):
        forward, back = seconds[row.stage]
        lines = (f"stage {row.stage}, rank {row.rank}", f"F {forward.value}", f"B {back.value}")
        boxes.append(Box(stage=row.stage, x=x - wide / 2, y=y - high / 2, lines=lines))
    return StageDrawing(
        width=max(x for x, _ in every) + wide / 2 + 1,
        height=max(y for _, y in every) + high / 2 + 1,
        boxes=tuple(boxes),
        lines=tuple(
            _line(edge, at[edge.source], bends[edge.source, edge.target], at[edge.target]) for edge in edges
        ),
    )


def _places(
    count: int, edges: Sequence[tuple[int, int]]
) -> tuple[list[Point], dict[tuple[int, int], list[Point]]]:
    """The middle of each stage, and the bends of edges over several columns, in pixels from the top left."""
    column = _columns(count, edges)
    bends: dict[tuple[int, int], range] = {}
    reads: list[list[int]] = [[] for _ in range(count)]
    """What each stage or bend is joined with in the column before it."""
    for source, target in edges:
        between = range(column[source] + 1, column[target])
        bends[source, target] = range(len(reads), len(reads) + len(between))
        column += between
        for bend in bends[source, target]:
            reads.append([bend - 1 if bend > bends[source, target].start else source])
        reads[target].append(len(reads) - 1 if between else source)
    columns = [[n for n in range(len(reads)) if column[n] == at] for at in range(max(column) + 1)]
    most, (wide, high) = max(map(len, columns)), BOX
    down: dict[int, float] = {}
    for nodes in columns:
        nodes.sort(key=lambda node: mean([down[n] for n in reads[node]] or [0.0]))
        down |= {node: at + (most - len(nodes)) / 2 for at, node in enumerate(nodes)}
    places = [
        (column[node] * (wide + GAP[0]) + wide / 2 + 1, down[node] * (high + GAP[1]) + high / 2 + 1)
        for node in range(len(reads))
    ]
    return places[:count], {edge: [places[bend] for bend in passed] for edge, passed in bends.items()}


def _columns(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Per stage the most edges on a path to it. Stages may be numbered in any order."""
    before: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for source, target in edges:
        before[target].append(source)
    column = [0] * count
    for stage in TopologicalSorter(before).static_order():
        column[stage] = max((column[source] + 1 for source in before[stage]), default=0)
    return column


def _line(edge: StageEdge, start: Point, bends: Sequence[Point], end: Point) -> EdgeLine:
    """A line from the right of one box to the left of another. In each column that it passes it is level for
    the width of a box, so that it curves only where there are none."""
    half = BOX[0] / 2
    stops = [(start[0] + half, start[1])]
    for x, y in bends:
        stops += [(x - half, y), (x + half, y)]
    stops.append((end[0] - half, end[1]))
    path = f"M{stops[0][0]:.1f} {stops[0][1]:.1f}"
    for (x, y), (to_x, to_y) in pairwise(stops):
        middle = (x + to_x) / 2
        path += f" C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    # The text stands on a level piece, or in the middle between two boxes.
    x, y = bends[len(bends) // 2] if bends else ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    return EdgeLine(edge=edge, path=path, x=x, y=y - 5)
