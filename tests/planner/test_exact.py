"""The exact planner against trying every cut."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st
from random_ops import cluster_of, op_chain, op_graph, profile_of, search_for
from trials import examples

from pipeloom.ir.graph import Buffer, OpGraph
from pipeloom.ir.stages import cut
from pipeloom.planner.search.cut_search import Search
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage
from pipeloom.planner.strategies.exact import balanced


def every_cut(ops: int, stages: int):
    return ((0, *inner, ops) for inner in combinations(range(1, ops), stages - 1))


def test_ops_that_share_an_updated_buffer_stay_together():
    graph, profile = op_chain([1] * 6)
    share = {"op1": {"updates": ("seen",)}, "op4": {"buffers": ("seen",)}}
    ops = tuple(replace(op, **share.get(op.name, {})) for op in graph.ops)
    graph = replace(graph, ops=ops, buffers=(Buffer(name="seen", shape=(1,), dtype="float32"),))
    search = search_for(graph, profile, cluster_of([10**9] * 3))
    assert search.model.cut_points.tolist() == [0, 1, 5, 6]
    assert search.fastest() == (4.0, (0, 1, 5, 6))
    assert balanced(search) == (0, 1, 5, 6)
    assert as_stages(graph, search.smallest()[1])


def test_nearly_as_many_stages_as_places_in_a_graph_of_many_ops_have_a_smallest_cut():
    graph, profile = op_chain([1] * 60)
    graph = replace(graph, whole=(tuple(f"op{k}" for k in range(6, 60)),))
    search = search_for(graph, profile, cluster_of([10**9] * 7))
    search = replace(search, coarse=16)
    assert search.large and search.smallest()[1] == (*range(7), 60)


def as_stages(graph: OpGraph, cuts):
    names = [op.name for op in graph.ops if not op.cheap]
    return cut(graph, {names[p]: s for s, (i, j) in enumerate(pairwise(cuts)) for p in range(i, j)})


def weigh(search: Search, cuts) -> tuple[float, float]:
    """Seconds of the slowest stage, inf if something does not fit; and the largest share of a cap.

    By the stages of the cut themselves, or, where several stages read the same value, as the search has them:
    it cannot know yet how many those will be, and counts one message.
    """
    stages = as_stages(search.model.graph, cuts)
    sent = [crossing.value.name for crossing in stages.crossings]
    if len(set(sent)) < len(sent):
        intervals = [search.evaluate(i, j, s) for s, (i, j) in enumerate(pairwise(cuts))]
        shares = [e.peak_bytes / cap for e, cap in zip(intervals, search.caps, strict=True)]
        return max(e.seconds for e in intervals), max(shares)
    made = [estimate_stage(search.model, stages, s) for s in range(len(search.caps))]
    needs = [one.plan(count).memory.total for one, count in zip(made, search.in_flight, strict=True)]
    share = max(need / cap for need, cap in zip(needs, search.caps, strict=True))
    slowest = max(one.turn_s for one in made)
    return (slowest if share <= 1 else float("inf")), share


@examples(25, 60)
@given(data=st.data())
def test_exact_is_the_best_of_all_cuts(data):
    ops = data.draw(st.integers(2, 8))
    stages = data.draw(st.integers(1, min(4, ops)))
    graph = op_graph(data.draw, ops)
    profiles = [profile_of(data.draw, graph) for _ in range(data.draw(st.integers(1, 2)))]
    caps = [data.draw(st.integers(500, 6000)) for _ in range(stages)]
    cluster = cluster_of(caps, bandwidth=data.draw(st.sampled_from([5.0, 1e9])), nodes=2)
    options = CostOptions(microbatches=4)
    model = CostModel(graph, [profiles[s % len(profiles)] for s in range(stages)], cluster, options)
    coarse = data.draw(st.sampled_from([2, 4, 400]))
    search = Search(model=model, caps=tuple(caps), in_flight=tuple(range(stages, 0, -1)), coarse=coarse)
    weights = [weigh(search, cuts) for cuts in every_cut(ops, stages)]
    value, cuts = search.fastest()
    assert value == pytest.approx(min(w[0] for w in weights))
    if cuts:
        assert weigh(search, cuts)[0] == pytest.approx(value)
    if not search.large:
        share, smallest = search.smallest()
        assert share == pytest.approx(min(w[1] for w in weights))
        assert weigh(search, smallest)[1] == pytest.approx(share)


def test_of_equally_fast_cuts_the_one_with_least_traffic():
    search = search_for(*op_chain([2, 1, 1, 2, 4], [10, 10, 100, 10, 10]), cluster_of([10**9] * 3, 1000.0))
    value, cuts = search.fastest()
    assert value == 4.0  # the last op alone takes that
    assert cuts[-2:] == (4, 5) and cuts[1] != 3  # which would be as fast, but sends the large value
