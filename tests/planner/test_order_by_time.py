"""Cuts whose order by time does not repeat without a flush, or stops: they get the order for equal times."""

import pytest
from branching_graphs import cluster_of, random_graph

from pipeloom.ir.errors import PlanError, ScheduleError
from pipeloom.planner.make_plan import make_plan
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.registry import PLANNERS
from pipeloom.planner.request import PlanOptions

CASES = [
    ("gis", "2bw", 887302, 11, "any", 3, 6, 7632),
    ("gis", "2bw", 472745, 14, "chain", 4, 8, 2832),
    ("v_half", "2bw", 827036, 11, "any", 3, 6, 3300),
    ("zb_h1", "2bw", 139478, 10, "chain", 4, 4, 2424),
    ("gis_h", "flush", 39241, 14, "any", 4, 8, 7452),
]
"""Schedule, weights; seed, ops, kind of the graph; devices, micro-batches, cap of each device in bytes."""

ALL = [name for name, known in PLANNERS.items() if not known.chooses_schedule and not known.asks]


@pytest.mark.parametrize(("schedule", "weights", "seed", "ops", "kind", "stages", "count", "cap"), CASES)
def test_no_order_of_one_cut_ends_planning(schedule, weights, seed, ops, kind, stages, count, cap):
    """Each planner has a plan that keeps its caps when it is simulated again, or says what is short."""
    graph, profile = random_graph(seed, ops, kind)
    cluster = cluster_of(stages, cap)
    costs = PlanCosts(graph, profile, cluster)
    plans = {}
    for name in ALL:
        try:
            plans[name] = make_plan(
                graph,
                profile,
                cluster,
                ranks=stages,
                schedule=schedule,
                microbatches=count,
                planner=name,
                options=PlanOptions(weights=weights),
                explained=False,
            )
        except PlanError as refusal:
            assert "repeat" not in refusal.message
    assert {"probe", "dawnpiper", "graphpipe"} <= set(plans)
    for plan in plans.values():
        timeline = costs.simulate(plan)
        assert timeline.step_s == plan.predicted_step_s
        assert all(timeline.peak_bytes(rank) <= cap for rank in range(stages))


def test_a_schedule_that_never_repeats_is_refused_by_all():
    graph, profile = random_graph(1, 8, "chain")
    for name in ("dawnpiper", "graphpipe", "probe", "balanced"):
        with pytest.raises(ScheduleError, match="repeat"):
            make_plan(
                graph,
                profile,
                cluster_of(2),
                ranks=2,
                schedule="gpipe",
                microbatches=4,
                planner=name,
                options=PlanOptions(weights="2bw"),
            )
