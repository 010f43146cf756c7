"""The stage graph as a drawing: a box per stage with its seconds, a line per edge with its bytes, as SVG.

Stages lie in columns, each after all that it reads. An edge over several columns has a bend in each of them,
between boxes. In a column, boxes and bends are ordered so that few lines cross, and moved towards what they
are joined with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import combinations, pairwise
from statistics import fmean as mean
from typing import TypeAlias

from ..ir.stages import StageGraph
from ..ir.text import format_bytes
from .tables import Both, StageRow, stage_figures

Point: TypeAlias = tuple[float, float]
Joined: TypeAlias = Mapping[int, tuple[list[int], list[int]]]
"""Node -> the nodes before and after it that it is joined with. A node is a stage or a bend."""

PASSES = 40
STRAIGHT = 8
"""How much more two bends of a line pull at each other than stages do."""

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
    """The middle of each stage, and the bends of edges over several columns, in pixels from the upper left.

    Source: the layered drawings of Sugiyama, Tagawa and Toda 1981, with columns ordered by barycentres.
    """
    column = _columns(count, edges)
    joined: dict[int, tuple[list[int], list[int]]] = {node: ([], []) for node in range(count)}
    bends: dict[tuple[int, int], range] = {}
    for source, target in edges:
        bends[source, target] = range(len(joined), len(joined) + column[target] - column[source] - 1)
        for at, bend in enumerate(bends[source, target], start=column[source] + 1):
            column.append(at)
            joined[bend] = ([], [])
        for one, other in pairwise([source, *bends[source, target], target]):
            joined[one][1].append(other)
            joined[other][0].append(one)
    columns = _ordered([[n for n in joined if column[n] == at] for at in range(max(column) + 1)], joined)
    down = _heights(columns, joined, count)
    top, (wide, high) = min(down.values()), BOX
    places = [
        (column[node] * (wide + GAP[0]) + wide / 2 + 1, (down[node] - top) * (high + GAP[1]) + high / 2 + 1)
        for node in range(len(joined))
    ]
    return places[:count], {edge: [places[bend] for bend in passed] for edge, passed in bends.items()}


def _ordered(columns: list[list[int]], joined: Joined) -> list[list[int]]:
    """The columns in the order with the fewest crossings that a few passes find, to the right and back."""
    best, fewest = columns, _crossings(columns, joined)
    for turn in range(PASSES if fewest else 0):
        side = turn % 2  # passing to the right looks back at what a node reads
        columns = [*columns]
        place = {node: float(at) for nodes in columns for at, node in enumerate(nodes)}
        for at in range(len(columns)) if side == 0 else reversed(range(len(columns))):
            middle = {n: mean([place[o] for o in joined[n][side]] or [place[n]]) for n in columns[at]}
            columns[at] = sorted(columns[at], key=middle.__getitem__)
            place |= {node: float(y) for y, node in enumerate(columns[at])}
        if (crossings := _crossings(columns, joined)) < fewest:
            best, fewest = columns, crossings
    return best


def _crossings(columns: list[list[int]], joined: Joined) -> int:
    place = {node: at for nodes in columns for at, node in enumerate(nodes)}
    lines = ([(place[n], place[o]) for n in nodes for o in joined[n][1]] for nodes in columns)
    return sum((a - c) * (b - d) < 0 for each in lines for (a, b), (c, d) in combinations(each, 2))


def _heights(columns: list[list[int]], joined: Joined, count: int) -> dict[int, float]:
    """Each node as near to what it is joined with as its neighbours, 1 away, allow. Bends keep to bends, so
    that long lines are straight."""
    height = {node: at - (len(nodes) - 1) / 2 for nodes in columns for at, node in enumerate(nodes)}
    for turn in range(PASSES):
        for nodes in columns if turn % 2 else reversed(columns):
            wanted = []
            for node in nodes:
                others = [o for side in joined[node] for o in side] or [node]
                pulls = [STRAIGHT if node >= count and other >= count else 1 for other in others]
                pulled = sum(pull * height[other] for pull, other in zip(pulls, others, strict=True))
                wanted.append((pulled / sum(pulls), sum(pulls)))
            height |= zip(nodes, _apart(wanted), strict=True)
    return height


def _apart(wanted: Sequence[tuple[float, int]]) -> list[float]:
    """Nearest to the wanted heights, by squares times weights, with at least 1 between neighbours.

    >>> _apart([(0.0, 1), (0.0, 1), (5.0, 1)])
    [-0.5, 0.5, 5.0]
    """
    groups: list[tuple[float, int, int]] = []  # of neighbours that touch: height of the first, weight, size
    for at, (y, weight) in enumerate(wanted):
        height, size = y - at, 1
        while groups and groups[-1][0] > height:
            other, more, count = groups.pop()
            height = (height * weight + other * more) / (weight + more)
            weight, size = weight + more, size + count
        groups.append((height, weight, size))
    heights = [height for height, _, size in groups for _ in range(size)]
    return [height + at for at, height in enumerate(heights)]


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
