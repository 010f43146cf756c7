"""The drawing of the stage graph: every stage and edge is there, and nothing lies on anything else."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations

from hypothesis import example, given, settings, strategies as st

from pipeloom.ir.flow import dag
from pipeloom.ir.stages import StageGraph, chain, replicate
from pipeloom.viewer.comparisons import StageRow
from pipeloom.viewer.stage_graph import BOX, draw_stages, stage_edges

TOWERS = dag(9, [(0, 1), (2, 3), (4, 5), (6, 7), (1, 8), (3, 8), (5, 8), (7, 8)], value_bytes=2048)


def rows_of(stages: StageGraph) -> list[StageRow]:
    return [StageRow(stage=s.index, rank=s.index, ops=1, parameters=0) for s in stages.stages]


def points(path: str) -> list[tuple[float, float]]:
    """The curve of an SVG path of cubic pieces, at many places."""
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", path)]
    at = list(zip(numbers[::2], numbers[1::2], strict=True))
    found = []
    for a, b, c, d in zip(at[::3], at[1::3], at[2::3], at[3::3], strict=False):
        for i in range(41):
            t = i / 40
            w = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            found.append(tuple(sum(wi * p[k] for wi, p in zip(w, (a, b, c, d), strict=True)) for k in (0, 1)))
    return found  # type: ignore[return-value]


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    """Stages of up to 9, any edges; numbered in any order."""
    count = draw(st.integers(2, 9))
    number = draw(st.permutations(range(count)))
    edges = {(number[a], number[b]) for b in range(count) for a in range(b) if draw(st.integers(0, 3)) == 0}
    return dag(count, sorted(edges) or [(number[0], number[1])])


@settings(max_examples=60)
@given(graphs())
@example(TOWERS)
@example(chain(32))
def test_no_box_lies_on_another_and_no_line_goes_through_one(stages: StageGraph) -> None:
    drawing = draw_stages(rows_of(stages), stage_edges(stages), (None, None))
    wide, high = BOX
    for one, other in combinations(drawing.boxes, 2):
        assert abs(one.x - other.x) >= wide + 8 or abs(one.y - other.y) >= high + 8
    for box in drawing.boxes:
        assert 0 <= box.x <= drawing.width - wide and 0 <= box.y <= drawing.height - high
    corner = {box.stage: (box.x, box.y) for box in drawing.boxes}
    for line in drawing.lines:
        assert corner[line.edge.source][0] + wide < corner[line.edge.target][0], "edges go to the right"
        for stage, (x, y) in corner.items():
            if stage not in (line.edge.source, line.edge.target):
                assert not any(x < px < x + wide and y < py < y + high for px, py in points(line.path))


def test_edges_say_what_crosses_and_comes_back() -> None:
    frozen = dag(3, [(0, 2), (1, 2)], no_gradient=[(1, 2)], value_bytes=4096)
    assert [edge.text for edge in stage_edges(frozen)] == ["4.0 KiB", "4.0 KiB, no gradient"]
    assert stage_edges(replicate(frozen)) == stage_edges(frozen)


def test_the_page_has_no_graph_where_no_edges_are_known(page_of: Callable[..., str]) -> None:
    for edges, found in ((stage_edges(TOWERS), 8), ((), 0)):
        assert page_of(stages=rows_of(TOWERS), edges=edges).count('class="edge"') == found
