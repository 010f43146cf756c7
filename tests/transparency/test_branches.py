"""Stages that form a DAG, with every pair of what else a plan may have: the numbers of one process."""

from itertools import combinations

import pytest
import runs
from delayed import assert_close, delayed, trained
from towers import JOBS, MICROBATCHES, plan_of

from pipeloom import verify
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.action import W
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.searched_order import with_searched_order
from pipeloom.planning import estimate

TOLERANCE = 1e-12

FEATURES = (
    "1f1b",
    "zb_h1",
    "split backward",
    "recompute",
    "offload",
    "copies in the schedule",
    "2bw",
    "width 2",
    "frozen tower",
    "two stages on a rank",
)
"""What a plan may have; its schedule is 1f1b unless said otherwise."""

CANNOT = {
    ("1f1b", "zb_h1"): "a plan has one schedule",
    ("zb_h1", "split backward"): "zb_h1 splits backwards by itself",
    ("offload", "copies in the schedule"): "what the policy offloads is what the schedule copies",
}
"""Pairs that are no plan, or the plan of one of the two."""


@pytest.mark.sampled("1f1b + copies in the schedule")
@pytest.mark.parametrize(
    "features", [pair for pair in combinations(FEATURES, 2) if pair not in CANNOT], ids=" + ".join
)
def test_pairs_of_features(features: tuple[str, ...]) -> None:
    job = JOBS["frozen tower" in features]
    plan = plan_of(job, features)
    if "2bw" in features:
        assert_close(trained(job, plan, drains=(3,)), delayed(job, plan.microbatches), TOLERANCE)
        return
    batches = [job.batch(seed, 2 * plan.microbatches) for seed in range(2)]
    plain = runs.plain(job, batches, plan.microbatches)
    runs.assert_same(runs.pipelined(job, plan, batches), plain, tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [MICROBATCHES, 3 * MICROBATCHES])
def test_a_plan_in_a_searched_order_gives_the_numbers_of_one_process(microbatches: int) -> None:
    job = JOBS[False]
    graph, cluster = runs.capture_of(job, 2).graph, find_cluster("3 x a100-40")
    costs = PlanCosts(graph, estimate(graph, cluster), cluster)
    how = {"ranks": 3, "schedule": "1f1b", "microbatches": microbatches, "planner": "graphpipe"}
    plan = make_plan(graph, costs.profiles, cluster, **how, options=PlanOptions(treatments=()))
    searched = with_searched_order(plan, costs)
    assert searched is not None
    split = any(action.kind == W for row in searched.as_schedule.rows for action in row)
    assert split, "what a split backward fills is what the search finds"
    verify(job, searched, tolerance=TOLERANCE).require()
