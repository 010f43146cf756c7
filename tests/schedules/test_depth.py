"""What is held follows the depth of the stage graph: the ranks of its longest path, not all there are."""

import networkx as nx
import pytest
from hypothesis import given, strategies as st
from small import simulated
from trials import examples

from pipeloom.ir.flow import dag
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.schedules import registry
from pipeloom.schedules.language import shape
from pipeloom.schedules.registry import shape_of

FOUR_TOWERS = dag(9, [(0, 1), (2, 3), (4, 5), (6, 7), (1, 8), (3, 8), (5, 8), (7, 8)])
"""Four towers of two stages and a join."""

TWO_LOOPS = dag(9, [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (3, 8), (7, 8)])
"""Two towers of four stages and a join, for two ranks each."""

LIMITED_BY_RANKS = "zb_h1 zb_h2 zb_1p zb_2p gis gis_g gis_h po zb_v dualpipev hanayo".split()


def depth(stages: StageGraph, placement: tuple[int, ...]) -> int:
    return shape_of(0, stages=stages, placement=placement, microbatches=4).depth


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[StageGraph, tuple[int, ...]]:
    """Any graph of up to 7 stages on any ranks."""
    count = draw(st.integers(1, 7))
    edges = [(a, b) for b in range(count) for a in range(b) if draw(st.booleans())]
    wished = draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
    number = {rank: i for i, rank in enumerate(sorted(set(wished)))}
    return dag(count, edges), tuple(number[rank] for rank in wished)


@examples(40, 100)
@given(placed_graphs())
def test_depth_is_the_most_different_ranks_of_any_path(case: tuple[StageGraph, tuple[int, ...]]) -> None:
    stages, placement = case
    graph = nx.DiGraph(list(stages.between))
    graph.add_nodes_from(range(len(placement)))
    paths = (p for a in graph for b in graph for p in nx.all_simple_paths(graph, a, b))
    most = max((len({placement[stage] for stage in path}) for path in paths), default=1)
    assert depth(stages, placement) == most


def test_where_paths_are_too_many_depth_is_never_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert depth(TWO_LOOPS, (0, 1, 0, 1, 2, 3, 2, 3, 4)) == 3
    monkeypatch.setattr(shape, "MOST_SETS", 0)
    assert depth(TWO_LOOPS, (0, 1, 0, 1, 2, 3, 2, 3, 4)) == 5


def step_and_peak(name: str, stages: StageGraph, placement: tuple[int, ...]) -> tuple[float, float]:
    """The step with F = I = W = 1, and the most that a rank holds, in micro-batches of all its stages."""
    made = registry.build(name, stages, placement, 16)
    held = [0.0] * made.ranks
    for stage, count in enumerate(registry.in_flight(made)):
        held[placement[stage]] += count / placement.count(placement[stage])
    return simulated(made, stages=stages).step_s, max(held)


@pytest.mark.parametrize("name", LIMITED_BY_RANKS)
def test_towers_hold_what_one_of_them_would_hold_alone(name: str) -> None:
    """In as many micro-batches as a chain of a tower and the join, and with the same step."""
    placement = tuple(range(9))
    assert step_and_peak(name, FOUR_TOWERS, placement) == step_and_peak(name, chain(3), (0, 1, 2))


@pytest.mark.parametrize(
    ("name", "most"),
    [("gis", 6), ("gis_h", 4), ("po", 4), ("zb_v", 5), ("dualpipev", 5), ("interleaved_1f1b", 6)],
)
def test_towers_with_two_stages_on_a_rank_hold_less_than_all_ranks_would(name: str, most: int) -> None:
    looped = registry.entry(name).place == "loop"
    folded = (0, 1, 0, 1, 2, 3, 2, 3, 4) if looped else (0, 1, 1, 0, 2, 3, 3, 2, 4)
    step, peak = step_and_peak(name, TWO_LOOPS, folded)
    assert peak <= most and step <= 16 * 6 + 6
