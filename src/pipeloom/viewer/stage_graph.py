"""The stage graph as a drawing: a box per stage with its seconds, a line per edge with its bytes, as SVG.

Where the boxes go is `graph_layout`'s answer (Sugiyama's layered layout; see decision 0012). Stages lie in
columns, each after all that it reads. An edge over several columns has a bend in each of them, between boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import TypeAlias

from ..ir.stages import StageGraph
from ..ir.units import format_bytes
from .report_facts import StageRow

Point: TypeAlias = tuple[float, float]

BOX = (132, 62)
"""Pixels of a box, across and down."""

GAP = (108, 34)
"""Pixels between boxes of two columns, and of one."""


@dataclass(frozen=True, kw_only=True)
class StageEdge:
    """What one stage sends to another per micro-batch: bytes of values, and of gradients that come back."""

    source: int
    target: int
    bytes: int
    gradient_bytes: int

    @property
    def ends(self) -> tuple[int, int]:
        return self.source, self.target

    @property
    def text(self) -> str:
        """The bytes as they stand at the line.

        >>> StageEdge(source=0, target=1, bytes=2048, gradient_bytes=0).text
        '2.0 KiB, no gradient'
        """
        there, back = format_bytes(self.bytes), format_bytes(self.gradient_bytes)
        if self.gradient_bytes == self.bytes:
            return there
        return f"{there}, {f'back {back}' if self.gradient_bytes else 'no gradient'}"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A stage in the drawing: its upper left corner, and its lines of text."""

    stage: int
    x: float
    y: float
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EdgeLine:
    """An edge in the drawing: an SVG path, and where its text stands."""

    edge: StageEdge
    path: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class StageDrawing:
    """Pixels of the drawing, its boxes and lines."""

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
    own = len(stages.stages) // stages.replicas
    return tuple(
        StageEdge(
            source=source,
            target=target,
            bytes=sum(value.bytes for value in values),
            gradient_bytes=sum(value.bytes for value in stages.gradients(source, target)),
        )
        for (source, target), values in sorted(stages.between.items())
        if max(source, target) < own
    )


def draw_stages(
    stages: Sequence[StageRow], edges: Sequence[StageEdge], texts: Mapping[int, Sequence[str]]
) -> StageDrawing:
    """texts: stage -> further lines in its box, such as its seconds."""
    at, bends = _places(len(stages), [edge.ends for edge in edges])
    every = [*at, *(point for route in bends.values() for point in route)]
    left, top = min(x for x, _ in every), min(y for _, y in every)
    wide, high = BOX

    def moved(point: Point) -> Point:
        """From the middles that the layout gives to pixels from the drawing's corner."""
        return point[0] - left + wide / 2 + 1, point[1] - top + high / 2 + 1

    at = [moved(point) for point in at]
    return StageDrawing(
        width=max(x for x, _ in every) - left + wide + 2,
        height=max(y for _, y in every) - top + high + 2,
        boxes=tuple(
            Box(
                stage=row.stage,
                x=at[place][0] - wide / 2,
                y=at[place][1] - high / 2,
                lines=(f"stage {row.stage}, rank {row.rank}", *texts.get(row.stage, ())),
            )
            for place, row in enumerate(stages)
        ),
        lines=tuple(
            _line(edge, at[edge.source], [*map(moved, bends[edge.ends])], at[edge.target]) for edge in edges
        ),
    )


def _places(
    count: int, edges: Sequence[tuple[int, int]]
) -> tuple[list[Point], dict[tuple[int, int], list[Point]]]:
    """The middle of each stage, and the bends of edges over several columns, in pixels.

    Each bend is a node of the layout, as the layout's own bends do not follow when it centres the nodes.
    """
    from graph_layout.hierarchical import SugiyamaLayout

    column = _columns(count, edges)
    links: list[tuple[int, int]] = []
    passed: dict[tuple[int, int], range] = {}
    nodes = count
    for source, target in edges:
        passed[source, target] = range(nodes, nodes + column[target] - column[source] - 1)
        nodes += len(passed[source, target])
        links += pairwise([source, *passed[source, target], target])
    across, down = BOX[0] + GAP[0], BOX[1] + GAP[1]
    # On a canvas that is too small the layout would leave less room between boxes.
    enough = float((nodes + 2) * max(across, down) + 100)
    layout = SugiyamaLayout(
        nodes=[{} for _ in range(nodes)],
        links=[{"source": source, "target": target} for source, target in links],
        size=(enough, enough),
        orientation="left-to-right",
        layer_separation=across,
        node_separation=down,
    )
    layout.run()
    at = [(float(node.x), float(node.y)) for node in layout.nodes]
    return at[:count], {edge: [at[node] for node in bends] for edge, bends in passed.items()}


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
