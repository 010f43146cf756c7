"""Under a larger cap no plan is slower than under a smaller one, nor than what a planner starts from."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from branching_graphs import cluster_of, random_graph
from hypothesis import given, settings, strategies as st
from joint_cases import with_memory
from layered import layered
from random_ops import cluster_of as caps_of, op_graph, profile_of
from random_stages import random_model

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.plan import Plan
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.planners import (
    PLANNERS,
    ByCuts,
    OneSchedule,
    fastest,
    finder_of,
    make_plan,
    planner,
    searched,
)
from pipeloom.planner.refine import faster_under_less
from pipeloom.planner.request import PlanOptions, Request
from pipeloom.planner.search.cut_search import Search
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
        # Cuts that were polished under a smaller cap are no candidates under a larger one.
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


def cut_into_two(memory: int) -> Request:
    graph, profile = random_graph(1, 8, "chain")
    options = PlanOptions(ranks=2, schedule="1f1b", microbatches=4)
    return Request(graph, profile, cluster_of(2, memory), options, planner("balanced"))


def candidates(request: Request) -> list[Candidate]:
    """Of every cut into two, the slowest first."""
    made = (Candidate(request, request.search(), (0, at, 8)) for at in range(1, 8))
    return sorted(made, key=lambda candidate: -candidate.timeline.step_s)


def test_what_passes_the_cap_itself_is_not_taken() -> None:
    fast = candidates(cut_into_two(1 << 40))[-1]
    tight = cut_into_two(max(map(fast.timeline.peak_bytes, range(2))) // 2)
    found = Candidate(tight, tight.search(), fast.cuts)
    assert any(found.over)
    assert faster_under_less(tight, None, lambda less: found) is None


def test_the_next_smaller_cap_is_searched_that_the_best_does_not_keep() -> None:
    request = cut_into_two(1 << 40)
    slow, *_, fast = candidates(request)
    asked: list[Request] = []

    def find(less: Request) -> Candidate:
        asked.append(less)
        return fast

    best = faster_under_less(request, slow, find)
    (less,) = asked
    most = max(map(slow.timeline.peak_bytes, range(2)))
    assert most / 2 ** (1 / 4) <= less.cluster.devices[0].memory_bytes + 1 <= most
    assert less.below_s == request.below_s
    assert best is not None and best.cuts == fast.cuts
    assert faster_under_less(request, fast, lambda less: slow) is fast


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
    for other in ("dawnpiper-alone", *finder_of("dawnpiper").beside):
        if (theirs := planned(graph, profiles, cluster, other)) is not None:
            assert best is not None and best.predicted_step_s <= theirs.predicted_step_s, other


def test_where_any_plan_will_do_the_longest_search_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(search: Search) -> tuple[int, ...]:
        raise AssertionError("probe has a plan")

    graph, cluster = layered(3, rows=2, hidden=512, length=256), find_cluster("2 x a100-40")
    profile = roofline(graph, cluster.devices[0])
    theirs = planned(graph, profile, cluster, "probe")
    own = PLANNERS["dawnpiper"]
    plan = OneSchedule(fastest(searched(ByCuts(never)), "probe"))
    monkeypatch.setitem(PLANNERS, "dawnpiper", replace(own, plan=plan))
    found = planned(graph, profile, cluster, "dawnpiper", fastest=False)
    assert theirs is not None and found is not None and found.stages == theirs.stages
    with pytest.raises(AssertionError, match="probe has a plan"):
        planned(graph, profile, cluster, "dawnpiper")


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
