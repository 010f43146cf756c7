"""Stages that form a DAG, with every pair of what else a plan may have: the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import graphpipe
import pytest
import runs
import torch
from delayed import delayed, trained

from pipeloom import Job, verify
from pipeloom.clusters.names import find_cluster
from pipeloom.ir.action import W
from pipeloom.ir.plan import Plan, widened
from pipeloom.ir.weights import Updates
from pipeloom.planner.plan_costs import PlanCosts
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions
from pipeloom.planner.searched_order import with_searched_order
from pipeloom.planning import estimate
from pipeloom.schedules.registry import build, build_steady

MICROBATCHES = 4
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
"""Pairs that are no plan, or the plan of one of the two; see `test_pairs_that_cannot_be`."""


def job_of(*, frozen: bool) -> Job:
    """Two towers of two layers and a join, in float64."""
    small = graphpipe.mmt(towers=2, layers=2, width=8, heads=2, length=3, classes=3)

    def model() -> torch.nn.Module:
        made = small.model().double()
        if frozen:
            made.towers[0].requires_grad_(False)
        return made

    def batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
        return {
            name: t.double() if t.is_floating_point() else t for name, t in small.batch(seed, rows).items()
        }

    return Job(
        model=model,
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        name="towers",
    )


JOBS = {frozen: job_of(frozen=frozen) for frozen in (False, True)}


def plan_of(job: Job, features: tuple[str, ...]) -> Plan:
    """A stage for each layer of each tower, and one for the join."""
    captured = runs.capture_of(job)

    def stage(module: str) -> int:
        if not module.startswith("towers."):
            return 4
        _, tower, _, layer, *_ = module.split(".")
        return 2 * int(tower) + int(layer)

    stage_of = {op.name: stage(op.module) for op in captured.graph.ops if not op.cheap}
    placement = (0, 1, 0, 1, 2) if "two stages on a rank" in features else (0, 1, 2, 3, 4)
    split = "split backward" in features
    name = "zb_h1" if "zb_h1" in features else "1f1b"
    name += ":offload=1" if "copies in the schedule" in features else ""
    plan = runs.plan_for(captured, stage_of, microbatches=MICROBATCHES, placement=placement)
    stages = plan.stage_graph(captured.graph)
    if "2bw" in features:
        updates = Updates(policy="2bw", every=MICROBATCHES)
        rows = str(build_steady(name, stages, placement, updates, split_backward=split))
        plan = replace(plan, weights="2bw")
    else:
        rows = str(build(name, stages, placement, MICROBATCHES, split_backward=split))
    plan = replace(plan, schedule=name, schedule_rows=tuple(rows.splitlines()))
    copied = {"offload", "copies in the schedule"} & set(features)
    ways = [*(["recompute"] if "recompute" in features else []), *(["offload"] if copied else [])]
    plan = runs.treated_plan(job, plan, *ways) if ways else plan
    return widened(plan, 2) if "width 2" in features else plan


@pytest.mark.sampled("1f1b + copies in the schedule")
@pytest.mark.parametrize(
    "features", [pair for pair in combinations(FEATURES, 2) if pair not in CANNOT], ids=" + ".join
)
def test_pairs_of_features(features: tuple[str, ...]) -> None:
    job = JOBS["frozen tower" in features]
    plan = plan_of(job, features)
    if "2bw" in features:
        found, expected = trained(job, plan, drains=(3,)), delayed(job, plan.microbatches)
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        worst, where = runs.difference(found.parameters, expected.parameters)
        assert worst <= TOLERANCE, f"{where} differs by {worst:.3g}"
        return
    batches = [job.batch(seed, 2 * plan.microbatches) for seed in range(2)]
    plain = runs.plain(job, batches, plan.microbatches)
    runs.assert_same(runs.pipelined(job, plan, batches), plain, tolerance=TOLERANCE)


@pytest.mark.slow
def test_pairs_that_cannot_be() -> None:
    job = JOBS[False]
    for pair, one in (
        (("zb_h1", "split backward"), "zb_h1"),
        (("offload", "copies in the schedule"), "copies in the schedule"),
    ):
        assert pair in CANNOT
        assert plan_of(job, pair) == plan_of(job, (one,))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [MICROBATCHES, 3 * MICROBATCHES])
def test_a_plan_in_a_searched_order_gives_the_numbers_of_one_process(microbatches: int) -> None:
    job = job_of(frozen=False)
    graph, cluster = runs.capture_of(job, 2).graph, find_cluster("3 x a100-40")
    costs = PlanCosts(graph, estimate(graph, cluster), cluster)
    how = {"ranks": 3, "schedule": "1f1b", "microbatches": microbatches, "planner": "graphpipe"}
    plan = make_plan(graph, costs.profiles, cluster, **how, options=PlanOptions(treatments=()))
    searched = with_searched_order(plan, costs)
    assert searched is not None
    split = any(action.kind == W for row in searched.as_schedule.rows for action in row)
    assert split, "what a split backward fills is what the search finds"
    verify(job, searched, tolerance=TOLERANCE).require()
