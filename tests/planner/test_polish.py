"""Planner dawnpiper against what it starts from, and against itself under smaller caps."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from layered import layered

from pipeloom.clusters.names import find_cluster
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.plan import Plan
from pipeloom.planner.make_plan import make_plan
from pipeloom.planner.registry import PLANNERS
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.search.cut_search import Search
from pipeloom.profiler.roofline import roofline

NEVER_SLOWER_THAN = PLANNERS["dawnpiper"].also

TOLERANCE = 1.03
"""By which a plan may be slower than that of a smaller cap: moves of cuts do not find every way."""


def planned(graph, profile, cluster: Cluster, strategy: str, **options) -> Plan | None:
    stages = len(cluster.devices)
    try:
        return make_plan(
            graph,
            profile,
            cluster,
            ranks=stages,
            schedule="1f1b",
            microbatches=2 * stages,
            planner=strategy,
            explained=False,
            options=PlanOptions(**options),
        )
    except InfeasibleError:
        return None


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), stages=st.integers(2, 3), cap=st.integers(1500, 6000), linked=st.booleans())
def test_no_start_is_faster_and_none_finds_a_plan_alone(
    data, stages, cap, linked, draw_graph, draw_profile, make_cluster
):
    graph = draw_graph(data.draw, data.draw(st.integers(6, 12)))
    profile = draw_profile(data.draw, graph)
    cluster = make_cluster([cap] * stages, bandwidth=100.0)
    if linked:
        link = Link(bandwidth_bytes_per_s=50.0)
        cluster = replace(cluster, devices=tuple(replace(d, host_link=link) for d in cluster.devices))
    profiles = {d.name: profile for d in cluster.devices}
    best = planned(graph, profiles, cluster, "dawnpiper")
    some = planned(graph, profiles, cluster, "dawnpiper", fastest=False)
    assert (best is None) == (some is None)
    for other in ("dawnpiper-alone", *NEVER_SLOWER_THAN):
        if (theirs := planned(graph, profiles, cluster, other)) is not None:
            assert best is not None, f"{other} has a plan"
            assert best.predicted_step_s <= theirs.predicted_step_s
    if best is not None:
        assert all(peak <= cap for peak in best.peaks)


def test_where_any_plan_will_do_the_longest_search_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(search: Search) -> tuple[int, ...]:
        raise AssertionError("probe has a plan")

    graph, cluster = layered(3, rows=2, hidden=512, length=256), find_cluster("2 x a100-40")
    profile = roofline(graph, cluster.devices[0])
    theirs = planned(graph, profile, cluster, "probe")
    own = PLANNERS["dawnpiper"]
    monkeypatch.setitem(PLANNERS, "dawnpiper", replace(own, find=never, also=("probe",)))
    found = planned(graph, profile, cluster, "dawnpiper", fastest=False)
    assert theirs is not None and found is not None and found.stages == theirs.stages
    with pytest.raises(AssertionError, match="probe has a plan"):
        planned(graph, profile, cluster, "dawnpiper")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layers", "stages", "rows"), [(2, 2, 2), (3, 3, 1), pytest.param(2, 4, 8, marks=pytest.mark.slow)]
)
def test_more_memory_makes_no_plan_slower(layers, stages, rows):
    graph, cluster = layered(layers, rows=rows, hidden=512, length=256), find_cluster(f"{stages} x a100-40")
    profile = roofline(graph, cluster.devices[0])
    free = planned(graph, profile, cluster, "balanced")
    most = max(stage.memory.total for stage in free.stages)
    before = float("inf")
    for percent in range(55, 110, 5):
        devices = tuple(replace(d, memory_bytes=most * percent // 100) for d in cluster.devices)
        if (plan := planned(graph, profile, replace(cluster, devices=devices), "dawnpiper")) is None:
            assert before == float("inf"), "a smaller cap had a plan"
        else:
            assert plan.predicted_step_s <= TOLERANCE * before
            before = min(before, plan.predicted_step_s)
