"""auto: several planners under the same caps, the fastest plan of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from branching_graphs import plan_of, random_graph, request_for

from pipeloom.ir.action import F
from pipeloom.ir.errors import InfeasibleError, PlanError
from pipeloom.planner.ask_planners import planners_asked
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.plan_table import limits
from pipeloom.planner.registry import PLANNERS
from pipeloom.planner.search_order import with_searched_order

ASKED = PLANNERS["auto"].asks


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_no_planner_that_is_asked_is_faster(seed: int) -> None:
    graph, profile = random_graph(seed, 10, "series-parallel")
    how = request_for(graph, profile, 2, slack=1.1)
    steps = {}
    for strategy in ASKED:
        try:
            steps[strategy] = plan_of(how, strategy).predicted_step_s
        except PlanError:
            steps[strategy] = None
    if not any(steps.values()):
        with pytest.raises(InfeasibleError):
            plan_of(how, "auto")
        return
    plan = plan_of(how, "auto")
    asked = planners_asked(plan)
    searched = asked.pop("searched", None)
    assert asked == steps
    shortest = min(step for step in steps.values() if step is not None)
    assert plan.predicted_step_s == (searched or shortest) <= shortest
    assert plan.planner == "auto"
    assert any("the fastest plan of several planners: dawnpiper" in said for said in limits(plan))


def test_what_fits_for_one_alone_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, profile = random_graph(0, 8, "chain")
    how = request_for(graph, profile, 2)
    none = replace(PLANNERS["exact"], find=lambda search: ())
    monkeypatch.setitem(PLANNERS, "never", none)
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], asks=("never", "exact")))
    plan = plan_of(how, "exact")
    assert (
        planners_asked(plan_of(how, "auto")).items()
        >= {"never": None, "exact": plan.predicted_step_s}.items()
    )
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], asks=("never",)))
    with pytest.raises(InfeasibleError, match="no cut into 2 stages fits"):
        plan_of(how, "auto")


@pytest.mark.parametrize("kind", ["chain", "series-parallel"])
def test_a_searched_order_keeps_the_caps_and_is_what_is_simulated(kind: str) -> None:
    graph, profile = random_graph(3, 12, kind)
    how = request_for(graph, profile, 3, slack=1.5)
    plan = plan_of(how, "exact")
    costs = PlanCosts(graph, profile, how.cluster)
    found = with_searched_order(plan, costs)
    assert found is not None, "1f1b of uneven stages without a split backward leaves something to gain"
    assert found.schedule == "searched" and found.stages != ()
    assert found.predicted_step_s < plan.predicted_step_s
    timeline = costs.simulate(found)
    assert timeline.step_s == found.predicted_step_s
    assert all(timeline.peak_bytes(rank) == peak for rank, peak in enumerate(found.peaks))
    assert all(peak <= cap for peak, cap in zip(found.peaks, plan.caps, strict=True))
    done = [sorted(action.microbatch for action in row if action.kind == F) for row in found.as_schedule.rows]
    assert done == [list(range(plan.microbatches))] * 3


def test_orders_of_plans_without_a_flush_are_left_as_they_are() -> None:
    graph, profile = random_graph(3, 12, "chain")
    how = request_for(graph, profile, 2)
    plan = plan_of(replace(how, options=replace(how.options, weights="2bw")), "exact")
    assert with_searched_order(plan, PlanCosts(graph, profile, how.cluster)) is None
