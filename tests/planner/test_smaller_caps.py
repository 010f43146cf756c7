"""Under a larger cap no plan is slower than under a smaller one, nor than what a planner starts from."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from joint_cases import with_memory
from layered import layered
from random_ops import cluster_of as caps_of, op_graph, profile_of
from random_stages import random_model

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.plan import Plan
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.planners import PLANNERS, JointPlanner, make_plan
from pipeloom.planner.request import PlanOptions
from pipeloom.profiler.roofline import roofline


def planned(graph, profile, cluster: Cluster, planner: str, **options) -> Plan | None:
    """Its peaks are those of the simulation. None if nothing fits."""
    stages = len(cluster.devices)
    how = {"ranks": stages, "schedule": "1f1b", "microbatches": 2 * stages, "planner": planner}
    try:
        plan = make_plan(graph, profile, cluster, PlanOptions(**options), explained=False, **how)
    except InfeasibleError:
        return None
    caps = tuple(device.memory_bytes for device in cluster.devices)
    assert plan.caps == caps and all(peak <= cap for peak, cap in zip(plan.peaks, caps, strict=True))
    assert PlanCosts(graph, profile, cluster).simulate(plan).step_s == plan.predicted_step_s
    return plan


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
        plan = planned(graph, profile, with_memory(cluster, cap), name, **options)
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
    best = planned(graph, profiles, cluster, "dawnpiper")
    some = planned(graph, profiles, cluster, "dawnpiper", fastest=False)
    assert (best is None) == (some is None)
    plan = PLANNERS["dawnpiper"].plan
    assert isinstance(plan, JointPlanner)
    for other in plan.planners:
        if (theirs := planned(graph, profiles, cluster, other)) is not None:
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
        plan = partial(planned, model.graph, model.profile, planner=strategy, treatments=("recompute",))
        most = max(stage.memory.total for stage in plan(cluster).stages)
        for cap in (int(most * share) for share in (0.95, 0.85, 0.75)):
            if found := plan(with_memory(cluster, cap)):
                count += 1
                assert max(stage.memory.total for stage in found.stages) <= cap
    assert count > 2, "too few plans to tell"
