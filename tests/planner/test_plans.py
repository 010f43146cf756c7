"""Plans of every planner: under their caps as simulated, whole, and what the options say."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from joint_cases import PLANNERS_OF_ONE, with_memory
from layered import layered
from random_ops import cluster_of as caps_of, op_graph, profile_of
from random_stages import random_model

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.action import OFFLOAD, RECOMPUTE, RELOAD
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.lowering.passes import lower
from pipeloom.plan_request import PlanRequest
from pipeloom.planner.microbatch_sizes import ProfiledModel, interpolate_sample, largest_size
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.plan_table import changed_clusters, what_if
from pipeloom.planner.planners import PLANNERS, JointPlanner, make_plan
from pipeloom.planner.refusals import NoCutFits
from pipeloom.planner.request import PlanOptions, Request
from pipeloom.profiler.roofline import roofline

GiB = 2**30

FREEING = [name for name in PLANNERS_OF_ONE if PLANNERS[name].optimises != "never"]


def case(layers: int, stages: int, cap: float, rows: int = 16) -> tuple[OpGraph, Profile, Cluster]:
    """A transformer graph on A100 cards with `cap` GiB each."""
    graph = layered(layers, rows=rows)
    cluster = find_cluster(f"{stages} x a100-40")
    return graph, roofline(graph, cluster.devices[0]), with_memory(cluster, int(cap * GiB))


def planned(graph, profile, cluster: Cluster, planner: str, *, explained=False, **options) -> Plan:
    """Its peaks are those of the simulation, and keep the caps."""
    stages = len(cluster.devices)
    how = {"ranks": stages, "schedule": "1f1b", "microbatches": 2 * stages, "planner": planner}
    plan = make_plan(graph, profile, cluster, PlanOptions(**options), explained=explained, **how)
    caps = tuple(device.memory_bytes for device in cluster.devices)
    step = PlanCosts(graph, profile, cluster).simulate(plan)
    assert plan.caps == caps and all(peak <= cap for peak, cap in zip(plan.peaks, caps, strict=True))
    peaks = tuple(step.peak_bytes(rank) for rank in range(stages))
    assert (step.step_s, peaks) == (plan.predicted_step_s, plan.peaks)
    return plan


def if_any(*case, **how) -> Plan | None:
    """None if nothing fits."""
    try:
        return planned(*case, **how)
    except InfeasibleError:
        return None


def of_layers(name: str, layers: int, stages: int, cap: float, **how) -> Plan:
    return planned(*case(layers, stages, cap), name, **how)


@pytest.mark.parametrize("shared", [False, True])
def test_a_plan_is_told_to_hold_what_it_was_made_with(shared: bool) -> None:
    graph, profile, cluster = case(4, 4, 40.0)
    how = PlanOptions(ranks=2, replicas=2, shard_optimizer=shared, planner="exact", schedule="1f1b")
    model = ProfiledModel(size=16, graph=graph, profiles={profile.device: profile})
    plan = PlanRequest(options=how, cluster=cluster).plan(model)
    figures = PlanCosts(graph, profile, cluster).figures(plan)
    assert [stage.memory for stage in figures] == [stage.memory for stage in plan.stages]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FREEING)
@pytest.mark.parametrize(("stages", "cap"), [(2, 1.95), (3, 1.6), (4, 1.3)])
def test_plans_that_free_memory_keep_to_the_cap_as_simulated(name, stages, cap):
    options = {"treatments": ("recompute", "offload")} if name == "exact" else {}
    plan = of_layers(name, 6, stages, cap, **options)
    assert sum(stage.recomputed_bytes + stage.offloaded_bytes for stage in plan.stages) > 0
    assert {t for stage in plan.memory.stages for t in stage.values()} <= {"keep", "recompute", "offload"}
    with pytest.raises(InfeasibleError):
        of_layers("exact", 6, stages, cap)  # with every residual kept nothing fits


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("stages", "cap"), [(2, 1.7), (3, 1.4), (4, 1.3)])
def test_searches_come_close_to_the_exact_planner_with_memory_optimisation(stages, cap):
    graph, profile, cluster = case(5, stages, cap)
    options, turn = PlanOptions(microbatches=2 * stages, treatments=("recompute",)), {}
    for name in ("exact", "dawnpiper-alone", "probe", "vpipe"):
        request = Request(graph, profile, cluster, options, PLANNERS[name])
        search = request.search()
        bounds = enumerate(pairwise(PLANNERS[name].plan.cut(request, search)[1]))
        turn[name] = max(search.evaluate(start, end, stage).seconds for stage, (start, end) in bounds)
    assert turn["exact"] <= min(turn.values()) * (1 + 1e-9)
    assert turn["dawnpiper-alone"] <= 1.05 * turn["exact"] and turn["probe"] <= 1.05 * turn["exact"]


@pytest.mark.parametrize("name", ["dawnpiper", "vpipe"])
def test_only_what_is_allowed_is_done_and_ahead_where_that_takes_no_time(name):
    """Stages that free more than they need to, and those for which freeing more is worth it, recompute while
    the gradient is on its way."""
    plan = of_layers(name, 6, 3, 1.35, treatments=("recompute",))
    assert {t for stage in plan.memory.stages for t in stage.values()} == {"recompute"}
    assert plan.memory.ahead and all(plan.stages[place].recomputed_bytes for place in plan.memory.ahead)
    program = lower(plan.as_schedule, plan.stage_graph(layered(6, rows=16)), policy=plan.memory)
    kinds = {step.kind for row in program.rows for step in row}
    assert RECOMPUTE in kinds and not kinds & {OFFLOAD, RELOAD}


@pytest.mark.parametrize("name", FREEING)
def test_less_than_one_micro_batch_in_full(name):
    """One stage has one micro-batch in flight: only what is made again late, and not ahead, needs less."""
    (stage,) = of_layers(name, 4, 1, 30.0, treatments=("recompute",)).stages
    cap = (stage.memory.total - 0.4 * stage.memory.residuals) / GiB
    plan = of_layers(name, 4, 1, cap, treatments=("recompute",))
    assert plan.stages[0].recomputed_bytes and plan.memory.ahead == ()
    assert plan.caps[0] < stage.memory.total


def test_vpipe_treats_the_residuals_of_a_layer_alike():
    plan, graph = of_layers("vpipe", 6, 3, 1.35), layered(6, rows=16)
    for stage in plan.memory.stages:
        treated = {
            (".".join(graph.op[residual.partition(".")[0]].module.split(".")[:2]), treatment)
            for residual, treatment in stage.items()
        }
        assert len({layer for layer, _ in treated}) == len(treated)


@pytest.mark.parametrize(
    ("weights", "versions"), [("flush", (1, 1, 1)), ("stash", (3, 2, 1)), ("2bw", (2, 2, 2))]
)
def test_weights_take_versions(weights, versions):
    plan = of_layers("dawnpiper", 6, 3, 8.0, weights=weights)
    assert plan.weights == weights and (plan.steady is None) == (weights == "flush")
    copies = tuple(stage.memory.parameters / stage.memory.gradients for stage in plan.stages)
    assert copies == versions
    if weights == "2bw":
        assert plan.predicted_step_s < of_layers("dawnpiper", 6, 3, 8.0).predicted_step_s


def test_offloading_without_a_link_to_the_host_is_refused():
    graph, profile, cluster = case(4, 2, 8.0)
    unlinked = {"host_link": None, "host_link_back": None, "switch": None}
    bare = replace(cluster, devices=tuple(replace(d, **unlinked) for d in cluster.devices))
    arguments = {"ranks": 2, "schedule": "1f1b", "microbatches": 4, "planner": "dawnpiper"}
    with pytest.raises(PlanError, match="link to the host"):
        make_plan(graph, profile, bare, **arguments, options=PlanOptions(treatments=("offload",)))
    assert make_plan(graph, profile, bare, **arguments)  # by itself it then only recomputes


def test_async_schedules_have_weights_of_their_own_unless_others_are_asked_for():
    graph, profile, cluster = case(4, 2, 8.0)
    arguments = {"ranks": 2, "schedule": "async_1f1b", "microbatches": 4}
    assert make_plan(graph, profile, cluster, **arguments).weights == "stash"
    other = make_plan(graph, profile, cluster, **arguments, options=PlanOptions(weights="2bw"))
    assert other.weights == "2bw" and other.steady is not None


@pytest.mark.slow
def test_infeasible_with_memory_optimisation_says_what_would_do():
    with pytest.raises(NoCutFits, match="freed") as caught:
        of_layers("dawnpiper", 6, 2, 0.6, explained=True)
    least = 0.6 * caught.value.share
    assert of_layers("dawnpiper", 6, 2, 1.06 * least)
    with pytest.raises(InfeasibleError):
        of_layers("dawnpiper", 6, 2, 0.9 * least)


@pytest.mark.slow
def test_more_memory_and_more_bandwidth():
    graph, profile, cluster = case(6, 3, 1.35)

    def again(other: Cluster) -> Plan:
        return make_plan(graph, profile, other, ranks=3, schedule="1f1b", microbatches=6, planner="dawnpiper")

    changes = {c.what: c for c in what_if(again(cluster), changed_clusters(cluster), again)}
    assert set(changes) == {
        "10 % more memory",
        "10 % more bandwidth between devices",
        "10 % more bandwidth to the host",
    }
    assert changes["10 % more memory"].gain > 0
    assert all(c.gain > -0.02 for c in changes.values())


def test_sizes_between_two_that_were_captured():
    def sample(rows: int) -> ProfiledModel:
        graph, profile, _ = case(3, 1, 39.0, rows)
        return ProfiledModel(size=rows, graph=graph, profiles={"a": profile})

    between, true = interpolate_sample(sample(4), sample(8), 6), sample(6)
    assert between.graph == true.graph
    assert between.profiles["a"].batch == true.profiles["a"].batch
    for name, cost in true.profiles["a"].costs.items():
        own = between.profiles["a"].costs[name]
        assert own.forward_s == pytest.approx(cost.forward_s, rel=0.05)
        assert own.extra_saved_bytes == cost.extra_saved_bytes and own.saves == cost.saves
    assert largest_size(range(1, 1000), lambda size: size <= 23) == 23
    assert largest_size([3, 5], lambda size: False) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("planner", "weights", "stages", "slower"),
    [
        ("dawnpiper-alone", "flush", 4, 0.0),
        ("probe", "2bw", 4, 0.0),
        ("exact", "flush", 4, 0.0),
        # Cuts that were moved under a smaller cap are no candidates under a larger one.
        pytest.param("dawnpiper", "flush", 3, 0.005, marks=pytest.mark.slow),
    ],
)
def test_a_larger_cap_gives_no_slower_step(planner: str, weights: str, stages: int, slower: float) -> None:
    graph, cluster = layered(stages, hidden=512, length=256, rows=8), find_cluster(f"{stages} x a100-40")
    profile = roofline(graph, cluster.devices[0])

    def step_s(cap: int, name: str, **options) -> tuple[float, int]:
        plan = if_any(graph, profile, with_memory(cluster, cap), name, **options)
        return (plan.predicted_step_s, max(plan.peaks)) if plan else (float("inf"), 0)

    _, most = step_s(1 << 50, "balanced", weights=weights)
    steps = [step_s(int(share * most), planner, weights=weights)[0] for share in (0.53, 0.7, 0.856, 1.1)]
    assert all(after <= before * (1 + slower + 1e-9) for before, after in pairwise(steps)), steps
    assert steps[-1] < float("inf")


@pytest.mark.slow
@settings(max_examples=12)
@given(data=st.data(), stages=st.integers(2, 3), cap=st.integers(1500, 6000), linked=st.booleans())
def test_no_start_of_dawnpiper_is_faster_and_none_finds_a_plan_alone(data, stages, cap, linked):
    graph = op_graph(data.draw, data.draw(st.integers(6, 12)))
    profile = profile_of(data.draw, graph)
    cluster = caps_of([cap] * stages, bandwidth=100.0)
    if linked:
        link = Link(bandwidth_bytes_per_s=50.0)
        cluster = replace(cluster, devices=tuple(replace(d, host_link=link) for d in cluster.devices))
    profiles = {d.name: profile for d in cluster.devices}
    best = if_any(graph, profiles, cluster, "dawnpiper")
    some = if_any(graph, profiles, cluster, "dawnpiper", fastest=False)
    assert (best is None) == (some is None)
    plan = PLANNERS["dawnpiper"].plan
    assert isinstance(plan, JointPlanner)
    for other in plan.planners:
        if (theirs := if_any(graph, profiles, cluster, other)) is not None:
            assert best is not None and best.predicted_step_s <= theirs.predicted_step_s, other


# Stages of a plan keep their caps by themselves, not only in the simulated step.


@pytest.mark.sampled("probe")
@pytest.mark.parametrize(
    "strategy", [pytest.param("dawnpiper", marks=pytest.mark.slow), "probe", "vpipe", "exact"]
)
def test_stages_of_a_plan_keep_their_caps_by_themselves_too(strategy):
    count = 0
    for seed in range(2 if strategy == "probe" else 5):  # that one is in the quick set
        draw = random.Random(seed)
        stages, model = draw.choice((3, 4)), random_model(seed, draw.randint(14, 24))
        cluster = replace(model.cluster, devices=model.cluster.devices[:stages])
        how = {"planner": strategy, "treatments": ("recompute",)}
        plan = partial(if_any, model.graph, model.profile, **how)
        most = max(stage.memory.total for stage in plan(cluster).stages)
        for cap in (int(most * share) for share in (0.95, 0.85, 0.75)):
            if found := plan(with_memory(cluster, cap)):
                count += 1
                assert max(stage.memory.total for stage in found.stages) <= cap
    assert count > 2, "too few plans to tell"
