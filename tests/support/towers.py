"""A model whose stages form a DAG, in float64: two towers of two layers and a join."""

from dataclasses import replace

import graphpipe
import nets
import runs
from torch import nn

from pipeloom import Job
from pipeloom.ir.plan import Plan, widened
from pipeloom.ir.weight_policies import Updates
from pipeloom.schedules.registry import build, build_steady

MICROBATCHES = 4


def job_of(*, frozen: bool) -> Job:
    """Two towers of two layers and a join, in float64."""
    small = graphpipe.mmt(towers=2, layers=2, width=8, heads=2, length=3, classes=3)

    def model() -> nn.Module:
        made = small.model()
        if frozen:
            made.towers[0].requires_grad_(False)
        return made

    return nets.in_double(replace(small, model=model, optimizer=nets.sgd, name="towers"))


JOBS = {frozen: job_of(frozen=frozen) for frozen in (False, True)}


def plan_of(job: Job, features: tuple[str, ...], placement: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Plan:
    """A stage for each layer of each tower, and one for the join.  features: see `test_branches`."""
    captured = runs.capture_of(job)

    def stage(module: str) -> int:
        if not module.startswith("towers."):
            return 4
        _, tower, _, layer, *_ = module.split(".")
        return 2 * int(tower) + int(layer)

    stage_of = {op.name: stage(op.module) for op in captured.graph.ops if not op.cheap}
    placement = (0, 1, 0, 1, 2) if "two stages on a rank" in features else placement
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
