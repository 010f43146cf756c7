"""pipedream-graph and piper against brute force, and their limits."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import inf

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipeloom.ir.errors import PlanError
from pipeloom.planner.search.down_sets import DownSets, PieceGraph
from pipeloom.planner.strategies.graph_chains import Machine, pipedream_graph, piper
from pipeloom.planner.strategies.pipedream import Layer, partition


def towers(count: int, layers: int) -> list[tuple[int, int]]:
    """Edges of so many towers, one after the other numbered."""
    return [(t * layers + k, t * layers + k + 1) for t in range(count) for k in range(layers - 1)]


@st.composite
def piece_graphs(draw: st.DrawFn) -> PieceGraph:
    count = draw(st.integers(2, 7))
    values = []
    for maker in range(count):
        readers = [r for r in range(maker + 1, count) if draw(st.integers(0, 2)) == 0]
        if readers:
            values.append((maker, tuple(readers), float(draw(st.integers(1, 9)))))
    numbers = st.tuples(*[st.integers(1, 9).map(float)] * count)
    return PieceGraph(draw(numbers), draw(numbers), draw(numbers), tuple(values))


def down_sets_by_hand(graph: PieceGraph) -> list[frozenset[int]]:
    every = range(len(graph.seconds))
    sets = (frozenset(some) for size in range(len(every) + 1) for some in combinations(every, size))
    return [own for own in sets if all(a in own for a, b in graph.edges if b in own)]


def chains(graph: PieceGraph, stages: int) -> Iterator[list[frozenset[int]]]:
    """Every way to cut a graph into a chain of non-empty stages."""
    sets = down_sets_by_hand(graph)

    def longer(chain: list[frozenset[int]]) -> Iterator[list[frozenset[int]]]:
        if len(chain) == stages:
            yield [*chain, sets[-1]] if chain[-1] < sets[-1] else []
            return
        for following in sets:
            if chain[-1] < following < sets[-1]:
                yield from longer([*chain, following])

    for chain in longer([frozenset()]):
        if chain:
            yield [b - a for a, b in pairwise(chain)]


def value_by_pipedream(graph: PieceGraph, machine: Machine, stages: Sequence[frozenset[int]]) -> float:
    worst, before = 0.0, frozenset[int]()
    for stage in stages:
        sent = sum(size for maker, readers, size in graph.values if maker in before and set(readers) - before)
        worst = max(worst, sent / machine.bandwidth, sum(graph.seconds[piece] for piece in stage))
        before |= stage
    return worst


def value_by_piper(graph: PieceGraph, machine: Machine, stages: Sequence[frozenset[int]]) -> float:
    worst = 0.0
    for number, stage in enumerate(stages):
        seconds = sum(graph.seconds[piece] for piece in stage)
        for maker, readers, size in graph.values:
            crossing = sum((maker in stage) != (reader in stage) for reader in readers)
            seconds += 2 * crossing * size / machine.bandwidth
        held = (len(stages) - number) * sum(graph.held_bytes[p] for p in stage)
        fits = held + sum(graph.state_bytes[p] for p in stage) <= machine.caps[number]
        worst = max(worst, seconds if fits else float("inf"))
    return worst


@settings(max_examples=60)
@given(piece_graphs())
def test_down_sets_are_as_many_as_antichains(graph: PieceGraph) -> None:
    wired = nx.DiGraph(sorted(graph.edges))
    wired.add_nodes_from(range(len(graph.seconds)))
    antichains = list(nx.antichains(wired))
    sets = DownSets(graph, most=len(antichains))
    assert len(sets) == len(antichains)
    held = [frozenset(p for p in range(len(graph.seconds)) if mask >> p & 1) for mask in sets.masks]
    assert set(held) == set(down_sets_by_hand(graph))
    for number in range(len(sets)):
        assert {held[inner] for inner in sets.within(number)} == {one for one in held if one < held[number]}


@settings(max_examples=60)
@given(piece_graphs(), st.integers(1, 3), st.floats(0.5, 8.0), st.integers(10, 120))
def test_both_find_the_best_chain_there_is(graph, stages, bandwidth, cap) -> None:
    stages = min(stages, len(graph.seconds))
    machine = Machine(bandwidth, [cap + 5 * stage for stage in range(stages)])
    for planner, value in ((pipedream_graph, value_by_pipedream), (piper, value_by_piper)):
        best = min(value(graph, machine, chain) for chain in chains(graph, stages))
        found = [frozenset(stage) for stage in planner(graph, machine)]
        assert bool(found) == (best < float("inf"))
        if found:
            assert found in list(chains(graph, stages))
            assert value(graph, machine, found) == pytest.approx(best)


@pytest.mark.parametrize(
    ("planner", "edges", "pieces", "most"),
    [(piper, towers(7, 4), 28, "40,000"), (pipedream_graph, towers(11, 3), 33, "100,000")],
)
def test_too_many_down_sets_are_refused(planner, edges, pieces, most) -> None:
    ones = (1.0,) * pieces
    graph = PieceGraph(ones, ones, ones, tuple((a, (b,), 1.0) for a, b in edges))
    with pytest.raises(PlanError, match=f"{pieces} pieces have more than {most} down-sets"):
        planner(graph, Machine(1.0, (100.0,) * 4))


def chain(seconds: Sequence[float], activations: Sequence[float], parameters: Sequence[float]) -> list[Layer]:
    return [Layer(*one) for one in zip(seconds, activations, parameters, strict=True)]


def slowest_s(layers: list[Layer], cuts: Sequence[int], bandwidth: float, memory: float) -> float:
    """By the paper's formulas; inf if a stage holds more than a worker has.

    A cut sends activations and their gradient. Stage s of d keeps weights and activations of d - s
    micro-batches.
    """
    times = [2 * layers[cut - 1].activation_bytes / bandwidth for cut in cuts[1:-1]]
    for stage, (start, end) in enumerate(pairwise(cuts)):
        own = layers[start:end]
        times.append(sum(layer.seconds for layer in own))
        held = sum(layer.activation_bytes + layer.parameter_bytes for layer in own)
        if (len(cuts) - 1 - stage) * held > memory:
            return inf
    return max(times)


@pytest.mark.parametrize("mode", ["paper", "repo"])
def test_the_cut_is_the_best_of_all(mode: str) -> None:
    """The repository neither counts transfers nor looks at memory."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        layers = chain(rng.uniform(1, 5, 6), [*rng.uniform(0, 40, 5), 0.0], rng.uniform(0, 30, 6))
        limits = (10.0, float(rng.uniform(20, 200))) if mode == "paper" else (inf, inf)
        every = [(0, *inner, 6) for inner in combinations(range(1, 6), 2)]
        best = min(slowest_s(layers, cuts, *limits) for cuts in every)
        seconds, cuts = partition(layers, 3, *limits)
        assert seconds == pytest.approx(best)
        assert best == inf or slowest_s(layers, cuts, *limits) == pytest.approx(best)
