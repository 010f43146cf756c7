"""The exact planner against trying every cut."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipeloom.ir.graph import Buffer, Op, OpGraph, Parameter, Value
from pipeloom.ir.profile import OpCost, Profile
from pipeloom.ir.stages import cut
from pipeloom.planner.infeasible import stage_needs
from pipeloom.planner.search.cut_search import Search, best_cuts
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage
from pipeloom.planner.strategies.balanced import balanced


def every_cut(ops: int, stages: int):
    for inner in combinations(range(1, ops), stages - 1):
        yield (0, *inner, ops)


def test_ops_that_share_an_updated_buffer_stay_together(make_cluster):
    graph, profile = chain_of([1] * 6, sizes=[10] * 6)
    share = {"op1": ((), ("seen",)), "op4": (("seen",), ())}
    ops = tuple(
        replace(op, buffers=share.get(op.name, ((), ()))[0], updates=share.get(op.name, ((), ()))[1])
        for op in graph.ops
    )
    buffers = (Buffer(name="seen", shape=(1,), dtype="float32"),)
    graph = replace(graph, ops=ops, buffers=buffers)
    search = search_for(graph, profile, make_cluster([10**9] * 3))
    assert search.model.cut_points.tolist() == [0, 1, 5, 6]
    assert search.fastest() == (4.0, (0, 1, 5, 6))
    assert balanced(search) == (0, 1, 5, 6)
    assert as_stages(graph, search.smallest()[1])


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
    held = [
        estimate_stage(search.model, stages, s).plan(q).memory.total for s, q in enumerate(search.in_flight)
    ]
    share = max(size / cap for size, cap in zip(held, search.caps, strict=True))
    slowest = max(search.model.turn_s(stages, s) for s in range(len(held)))
    return (slowest if share <= 1 else float("inf")), share


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_exact_is_the_best_of_all_cuts(data, draw_graph, draw_profile, make_cluster):
    ops = data.draw(st.integers(2, 8))
    stages = data.draw(st.integers(1, min(4, ops)))
    graph = draw_graph(data.draw, ops)
    profiles = [draw_profile(data.draw, graph) for _ in range(data.draw(st.integers(1, 2)))]
    caps = [data.draw(st.integers(500, 6000)) for _ in range(stages)]
    cluster = make_cluster(caps, bandwidth=data.draw(st.sampled_from([5.0, 1e9])), nodes=2)
    options = CostOptions(microbatches=4, overlap=data.draw(st.booleans()))
    model = CostModel(graph, [profiles[s % len(profiles)] for s in range(stages)], cluster, options)
    search = Search(
        model=model,
        caps=tuple(caps),
        in_flight=tuple(range(stages, 0, -1)),
        coarse=data.draw(st.sampled_from([2, 4, 400])),
    )
    weights = [weigh(search, cuts) for cuts in every_cut(ops, stages)]
    value, cuts = search.fastest()
    assert value == pytest.approx(min(w[0] for w in weights))
    if cuts:
        assert weigh(search, cuts)[0] == pytest.approx(value)
    if not search.large:
        share, smallest = search.smallest()
        assert share == pytest.approx(min(w[1] for w in weights))
        assert weigh(search, smallest)[1] == pytest.approx(share)


def test_of_equally_fast_cuts_the_one_with_least_traffic(make_cluster):
    graph, profile = chain_of([2, 1, 1, 2, 4], sizes=[10, 10, 100, 10, 10])
    search = search_for(graph, profile, make_cluster([10**9] * 3, bandwidth=1000.0))
    value, cuts = search.fastest()
    assert value == 4.0  # the last op alone takes that
    assert cuts[-2:] == (4, 5) and cuts[1] != 3  # which would be as fast, but sends the large value


def chain_of(seconds, sizes, weight: int = 10):
    """x -> op0 -> op1 -> ...; every op has a weight and saves its input."""
    ops, costs, source = [], {}, "x"
    for k, (s, size) in enumerate(zip(seconds, sizes, strict=True)):
        out = Value(name=f"v{k}", shape=(size,), dtype="float32", needs_grad=True)
        reads = {"inputs": (source,), "params": (f"w{k}",)}
        ops.append(Op(name=f"op{k}", target="aten.linear.default", outputs=(out,), **reads))
        costs[f"op{k}"] = OpCost(forward_s=float(s), saves=(source,))
        source = out.name
    graph = OpGraph(
        name="chain",
        inputs=(Value(name="x", shape=(10,), dtype="float32"),),
        ops=tuple(ops),
        buffers=(),
        parameters=tuple(Parameter(name=f"w{k}", shape=(weight,), dtype="float32") for k in range(len(ops))),
        loss=source,
    )
    return graph, Profile(device="cpu", source="hand", graph=graph.fingerprint, batch=(), costs=costs)


def search_for(graph, profile, cluster, in_flight=None) -> Search:
    stages = len(cluster.devices)
    return Search(
        model=CostModel(graph, [profile] * stages, cluster, CostOptions(microbatches=2 * stages)),
        caps=tuple(d.memory_bytes for d in cluster.devices),
        in_flight=in_flight or tuple(range(stages, 0, -1)),
    )


def test_a_tight_cap_moves_the_cut(make_cluster):
    graph, profile = chain_of([1] * 8, sizes=[1000] * 8)
    roomy = search_for(graph, profile, make_cluster([10**9] * 2))
    assert roomy.fastest() == (4.0, (0, 4, 8))
    # The first stage holds two micro-batches: with less memory than the balanced cut needs, it gets less.
    _, smallest = roomy.smallest()
    assert smallest[1] < 4
    cap = max(stage_needs(roomy, smallest))
    tight = search_for(graph, profile, make_cluster([cap] * 2))
    assert tight.fastest()[1] == smallest
    assert search_for(graph, profile, make_cluster([cap - 1] * 2)).fastest() == (float("inf"), ())


def test_unequal_devices(make_cluster):
    graph, profile = chain_of([1] * 9, sizes=[10] * 9)
    slow = Profile(
        device="slow",
        source="hand",
        graph=profile.graph,
        batch=(),
        costs={name: OpCost(forward_s=2 * c.forward_s, saves=c.saves) for name, c in profile.costs.items()},
    )
    cluster = make_cluster([10**9] * 2)
    model = CostModel(graph, [profile, slow], cluster, CostOptions(microbatches=4))
    assert Search(model=model, caps=(10**9, 10**9), in_flight=(2, 1)).fastest() == (6.0, (0, 6, 9))


def test_sweep_of_sums():
    """Minimising a sum instead: lengths squared make equal parts best."""
    value, cuts = best_cuts(
        np.arange(7), 3, lambda start, ends, ranks: np.tile((ends - start) ** 2.0, (len(ranks), 1)), np.add
    )
    assert (value, cuts) == (12.0, (0, 2, 4, 6))


def busy_chain(ops: int):
    """A long chain with skip connections, residual bytes and times that vary; deterministic."""
    rng = np.random.default_rng(0)
    graph, profile = chain_of(rng.uniform(0.5, 2.0, ops), sizes=rng.integers(100, 2000, ops), weight=500)
    skips = tuple(
        replace(op, inputs=(*op.inputs, graph.ops[k - 7].outputs[0].name)) if k > 9 else op
        for k, op in enumerate(graph.ops)
    )
    return replace(graph, ops=skips), profile


@pytest.mark.slow
def test_the_coarse_search_in_front_changes_nothing(make_cluster):
    graph, profile = busy_chain(400)
    roomy = search_for(graph, profile, make_cluster([10**9] * 8))
    share, _ = roomy.smallest()
    tight = search_for(graph, profile, make_cluster([int(1.1 * share * 10**9)] * 8))
    value, cuts = tight.fastest()
    bounded = Search(model=tight.model, caps=tight.caps, in_flight=tight.in_flight, coarse=50)
    assert bounded.fastest() == (value, cuts)
