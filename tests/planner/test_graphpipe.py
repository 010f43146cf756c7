"""Branches of op graphs, and stages that are cut from them side by side."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest
from branching_graphs import KINDS, Reads, cluster_of, plan_of, random_graph, reads_of, request_for, step_s
from hypothesis import given, strategies as st
from layered import layered
from random_ops import wired

from pipeloom import plan_request
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.profile import OpCost
from pipeloom.planner.branches import BranchOrdered, OpBlock, Parallel, Series, branch_orders, decompose
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.microbatch_sizes import ProfiledModel
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions, Request
from pipeloom.planner.strategies.graphpipe import shallow_cuts
from pipeloom.profiler.roofline import roofline


def leaves(term) -> list[int]:
    return list(term.ops) if isinstance(term, OpBlock) else [op for part in term.terms for op in leaves(part)]


@given(
    seed=st.integers(0, 10**6), ops=st.integers(2, 30), kind=st.sampled_from(KINDS), most=st.integers(1, 8)
)
def test_every_order_of_branches_is_a_topological_order_of_all_ops(seed, ops, kind, most):
    edges = [(j, i) for i, row in enumerate(reads_of(random.Random(seed), ops, kind)) for j in row]
    tree = decompose(ops, edges)
    assert sorted(leaves(tree)) == list(range(ops))
    seconds = np.random.default_rng(seed).random(ops)
    orders = branch_orders(tree, seconds, seconds.sum() / 4, most, edges)
    assert 1 <= len(orders) <= most
    assert len({ordered.ops for ordered in orders}) == len(orders)
    for ordered in orders:
        place = {op: index for index, op in enumerate(ordered.ops)}
        assert sorted(place) == list(range(ops))
        assert all(place[source] < place[target] for source, target in edges)
    if kind == "chain":
        assert [ordered.ops for ordered in orders] == [tuple(range(ops))]


def test_towers_run_in_turn_come_apart_unless_they_are_light():
    #   0 -> 1, 2;  1 -> 3 -> 5;  2 -> 4 -> 6;  5, 6 -> 7
    towers = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 7)]
    tree = decompose(8, towers)
    assert isinstance(tree, Series)
    assert [type(part) for part in tree.terms] == [OpBlock, Parallel, OpBlock]
    (first,) = branch_orders(tree, np.ones(8), 1.0, 1)
    assert first.ops == (0, 1, 3, 5, 2, 4, 6, 7)
    assert first.borders == (1, 4, 7)
    assert branch_orders(tree, np.ones(8), 4.0, 1)[0].ops == tuple(range(8))  # too light to be pulled apart


def test_a_tree_may_be_deeper_than_pythons_stack():
    ops = 1000
    nested = [(op, ops - 1 - op) for op in range(ops // 2)] + [(op, op + 1) for op in range(ops - 1)]
    tree = decompose(ops, nested)
    assert branch_orders(tree, np.ones(ops), 1.0, 3)[0].ops == tuple(range(ops))


def with_slow(request: Request, memory: float) -> Request:
    """The second device takes twice as long, and holds so many times as much."""
    first, second, *others = request.cluster.devices
    second = replace(second, name="slow", memory_bytes=int(second.memory_bytes * memory))
    costs = {op: cost.scaled(2, 2) for op, cost in request.profile.costs.items()}
    profiles = {"d": request.profile, "slow": replace(request.profile, device="slow", costs=costs)}
    cluster = replace(request.cluster, devices=(first, second, *others))
    return replace(request, profile=profiles, cluster=cluster)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_never_slower_than_the_exact_chain_or_than_without_branches(seed, unequal):
    """Also with a device that is slower and has more or less memory than the others."""
    dice = random.Random(seed)
    graph, profile = random_graph(seed, dice.randint(6, 14 if unequal else 20), KINDS[seed % 3])
    request = request_for(graph, profile, dice.randint(2, 4), slack=dice.uniform(1, 1.3) + 0.25 * unequal)
    if unequal:
        request = with_slow(request, (1.5, 0.9)[seed % 2])
    plan = plan_of(request)
    assert plan.predicted_step_s <= step_s(request, "exact") * (1 + 1e-6)
    assert plan.predicted_step_s <= step_s(request, branches=False) * (1 + 1e-6)
    caps = [device.memory_bytes for device in request.cluster.devices]
    assert all(peak <= cap for peak, cap in zip(plan.peaks, caps, strict=True))


def steps_of_all(request: Request, reads: Reads, stages: int) -> Iterator[float]:
    """Of every way to share out the ops that keeps its caps: each op in the stage of what it reads or later.
    With as many micro-batches in flight as the depth asks for and with more."""
    for stage_of in product(range(stages), repeat=len(reads)):
        counts = [stage_of.count(stage) for stage in range(stages)]
        if 0 in counts or any(stage_of[j] > stage_of[i] for i, row in enumerate(reads) for j in row):
            continue
        order = tuple(sorted(range(len(reads)), key=lambda op: (stage_of[op], op)))
        search = replace(request.search(BranchOrdered(order, (0,))), by_depth=True)
        for slack in range(stages):
            found = Candidate(replace(request, slack=slack), search, (0, *accumulate(counts)))
            if found.fits and found.tighter() is None:
                yield found.timeline.step_s


@pytest.mark.parametrize("seed", range(4))
def test_small_graphs_are_cut_nearly_as_well_as_by_trying_all(seed):
    dice = random.Random(seed)
    stages, ops = dice.randint(2, 3), dice.randint(5, 6)
    graph, profile = random_graph(seed, ops, "series-parallel")
    request = request_for(graph, profile, stages, slack=dice.choice([None, 1.0, 1.1, 1.3]))
    best = min(steps_of_all(request, reads_of(random.Random(seed), ops, "series-parallel"), stages))
    assert best * (1 - 1e-9) <= step_s(request) <= 1.05 * best


def towers_of(count: int, layers: int) -> Request:
    """Towers of equal ops, run in turn, and a join; messages take next to no time."""
    last = count * layers
    reads = [[i - count] if i >= count else [] for i in range(last)] + [list(range(last - count, last))]
    takes = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
    costs = [OpCost(**takes, saves=(f"v{op}",)) for op in range(last + 1)]
    graph, profile = wired(reads, [15] * len(reads), [10] * len(reads), costs)
    return request_for(graph, profile, 2 * count, bytes_per_s=1e9)


def test_towers_side_by_side_are_as_deep_as_one_tower_and_say_what_that_gains():
    plan = plan_of(towers_of(2, 4), microbatches=8)
    figures = {key: float(text) for key, text in plan.notes.items() if "branches." in key}
    assert figures["branches.depth"] < figures["no_branches.depth"] == 4
    assert figures["branches.step_s"] == plan.predicted_step_s
    assert plan.predicted_step_s < 0.95 * figures["no_branches.step_s"]
    assert figures["branches.peak_bytes"] == max(plan.peaks) and figures["no_branches.peak_bytes"] > 0
    # Four stages in a row with two or more micro-batches in flight fill and drain for longer than two.
    assert figures["no_branches.sequential_step_s"] > 1.05 * figures["branches.step_s"]


def test_stages_that_fit_only_with_residuals_freed_have_a_plan():
    """The first cuts of `graphpipe` are those that keep every residual."""
    graph, cluster = layered(6, rows=16), find_cluster("2 x a100-40 with 1.95GiB")
    profile = roofline(graph, cluster.devices[0])
    plan = make_plan(graph, profile, cluster, ranks=2, schedule="1f1b", microbatches=4, planner="graphpipe")
    assert max(plan.peaks) <= cluster.devices[0].memory_bytes
    assert sum(stage.recomputed_bytes + stage.offloaded_bytes for stage in plan.stages) > 0


# Plans for a DAG of stages where messages, or sums of gradients, take long.


def test_messages_that_take_longer_than_the_model_computes():
    """Cuts for a DAG of stages where messages take longer than the whole model computes. The bisection of
    `graphpipe` began at the time of a stage with all ops and no messages, which every stage then passed:
    it proposed nothing, and the plan was that of a chain."""
    graph, profile = random_graph(3, 8, "series-parallel")
    search = request_for(graph, profile, 3, bytes_per_s=0.01).search(BranchOrdered(tuple(range(8)), (0,)))
    cuts = next(shallow_cuts(search))
    assert cuts[0] == 0 and cuts[-1] == 8 and len(cuts) == 4


@pytest.mark.slow
def test_replicas_of_a_dag_are_no_slower_than_those_of_a_chain() -> None:
    """A DAG of stages with several replicas is not slower than other plans once their gradients are
    summed."""
    graph, profile = random_graph(11, random.Random(11).randint(5, 8), "series-parallel")
    model = ProfiledModel(size=1, graph=graph, profiles={"d": profile})
    options = PlanOptions(ranks=3, replicas=2, microbatches=12, planner="graphpipe", treatments=())
    slow_links = cluster_of(6, bytes_per_s=10.0)  # the sum of gradients takes as long as some micro-batches
    request = plan_request.PlanRequest(cluster=slow_links, options=options)
    made = request.plan(model)
    others = [request.changed(branches=False), request.changed(planner="exact")]
    assert made.planner == "graphpipe" and made.width == 2
    assert made.predicted_step_s <= min(way.plan(model).predicted_step_s for way in others) * (1 + 1e-9)
