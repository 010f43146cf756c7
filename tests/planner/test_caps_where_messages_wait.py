"""Stages of a plan keep their caps by themselves, not only in the simulated step."""

import random
from dataclasses import replace

import pytest
from random_stages import random_model

from pipeloom.ir.errors import InfeasibleError
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions


@pytest.mark.sampled("vpipe")
@pytest.mark.parametrize(
    "strategy", [pytest.param("dawnpiper", marks=pytest.mark.slow), "probe", "vpipe", "exact"]
)
def test_stages_of_a_plan_keep_their_caps_by_themselves_too(strategy):
    planned = 0
    for seed in range(5):
        draw = random.Random(seed)
        stages, model = draw.choice((3, 4)), random_model(seed, draw.randint(14, 24))

        def plan(cap, stages=stages, model=model):
            devices = tuple(replace(d, memory_bytes=cap) for d in model.cluster.devices[:stages])
            return make_plan(
                model.graph,
                model.profile,
                replace(model.cluster, devices=devices),
                ranks=stages,
                schedule="1f1b",
                microbatches=2 * stages,
                planner=strategy,
                explained=False,
                options=PlanOptions(treatments=("recompute",)),
            )

        most = max(stage.memory.total for stage in plan(1 << 40).stages)
        for share in (0.95, 0.85, 0.75):
            try:
                found = plan(int(most * share))
            except InfeasibleError:
                continue
            planned += 1
            assert max(stage.memory.total for stage in found.stages) <= int(most * share)
    assert planned > 5, "too few plans to tell"
