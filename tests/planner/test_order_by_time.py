"""Cuts whose order by time does not repeat without a flush, or stops: they get the order for equal times."""

from pathlib import Path

import pytest
from branching_graphs import cluster_of, random_graph
from joint_cases import PLANNERS_OF_ONE

from pipeloom.ir.errors import PlanError, ScheduleError
from pipeloom.ir.plan import Plan
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.plan_table import limits
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions

CASES = [
    ("zb_h1", "2bw", 139478, 10, "chain", 4, 4, 2424),
    ("gis_h", "flush", 39241, 14, "any", 4, 8, 7452),
    ("gis", "2bw", 887302, 11, "any", 3, 6, 7632),
    ("gis", "2bw", 472745, 14, "chain", 4, 8, 2832),
]
"""Schedule, weights; seed, ops, kind of the graph; devices, micro-batches, cap of each device in bytes."""


def planned(case: tuple, planner: str, **how: bool) -> tuple[Plan, PlanCosts]:
    schedule, weights, seed, ops, kind, stages, count, cap = case
    graph, profile = random_graph(seed, ops, kind)
    cluster = cluster_of(stages, cap)
    what = {"ranks": stages, "schedule": schedule, "microbatches": count, "planner": planner}
    plan = make_plan(graph, profile, cluster, PlanOptions(weights=weights), **what, **how)
    return plan, PlanCosts(graph, profile, cluster)


@pytest.mark.sampled(len(PLANNERS_OF_ONE))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PLANNERS_OF_ONE)
def test_no_order_of_one_cut_ends_planning(name, case):
    """Each planner has a plan that keeps its caps when it is simulated again, or says what is short."""
    try:
        plan, costs = planned(case, name, explained=False)
    except PlanError as refusal:
        assert "repeat" not in refusal.message and name not in ("probe", "dawnpiper", "graphpipe")
        return
    timeline = costs.simulate(plan)
    assert timeline.step_s == plan.predicted_step_s
    assert all(timeline.peak_bytes(rank) <= case[-1] for rank in range(timeline.ranks))


@pytest.mark.parametrize(
    ("case", "told"), [(CASES[2], True), (("zb_h1", "2bw", 1, 8, "chain", 2, 4, 1 << 40), False)]
)
def test_a_plan_says_that_its_order_is_that_for_equal_times(case: tuple, told: bool) -> None:
    assert any("equal times" in said for said in limits(planned(case, "probe")[0])) == told


BROKEN = """
from pipeloom.ir.action import F
from pipeloom.schedules.language.recipe import Recipe

def broken(s):
    uneven = len({cost.forward_s for cost in s.costs}) > 1
    return Recipe(priority=lambda a: (a.kind == F, a.microbatch), memory=0 if uneven else s.ranks)
"""


def test_a_schedule_of_a_file_that_stops_with_real_times_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    with pytest.raises(ScheduleError, match="limit"):
        planned((f"{file}:broken", "flush", 1, 8, "chain", 2, 4, 1 << 40), "balanced")
