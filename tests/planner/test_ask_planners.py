"""auto: several planners under the same caps, the fastest plan of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from branching_graphs import random_graph, request_for

from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.ir.plan import Plan
from pipeloom.planner import PLANNERS, Request, limits, make_plan, planners_asked

ASKED = PLANNERS["auto"].asks


def plan_by(how: Request, strategy: str) -> Plan:
    return make_plan(
        how.graph,
        how.profile,
        how.cluster,
        stages=len(how.cluster.devices),
        schedule=how.schedule,
        microbatches=how.microbatches,
        strategy=strategy,
        options=how.options,
        explained=False,
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_no_planner_that_is_asked_is_faster(seed: int) -> None:
    graph, profile = random_graph(seed, 10, "series-parallel")
    how = request_for(graph, profile, 2, slack=1.1)
    steps = {}
    for strategy in ASKED:
        try:
            steps[strategy] = plan_by(how, strategy).predicted_step_s
        except PlanError:
            steps[strategy] = None
    if not any(steps.values()):
        with pytest.raises(InfeasibleError):
            plan_by(how, "auto")
        return
    plan = plan_by(how, "auto")
    assert planners_asked(plan) == steps
    assert plan.predicted_step_s == min(step for step in steps.values() if step is not None)
    assert plan.planner == "auto"
    assert any("the fastest plan of several planners: dawnpiper" in said for said in limits(plan))


def test_what_fits_for_one_alone_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, profile = random_graph(0, 8, "chain")
    how = request_for(graph, profile, 2)
    none = replace(PLANNERS["exact"], find=lambda search: ())
    monkeypatch.setitem(PLANNERS, "never", none)
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], asks=("never", "exact")))
    plan = plan_by(how, "auto")
    assert planners_asked(plan) == {"never": None, "exact": plan.predicted_step_s}
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], asks=("never",)))
    with pytest.raises(InfeasibleError, match="no cut into 2 stages fits"):
        plan_by(how, "auto")
