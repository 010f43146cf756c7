"""What a handler finds of a micro-batch's residuals where the plan treats some of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import runs
import zoo

from pipeloom import Options, Pipeline
from pipeloom.ir.action import B, F
from pipeloom.ir.memory_policy import MemoryPolicy, Treatment
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import cut
from pipeloom.runtime import OperationContext
from pipeloom.schedules import Operation, declare
from pipeloom.tracer.stage import stage_residuals

JOB = zoo.job("skips")
Seen = dict[str, list[set[str]]]


def plan_of(treatment: Treatment, ahead: tuple[int, ...]) -> tuple[Plan, Seen]:
    """One stage and one micro-batch, with a look behind F and one in front of B."""
    captured = runs.capture_of(JOB, 2)
    residuals = stage_residuals(captured, cut(captured.graph, runs.even(captured.graph, 1)), 0)
    names = [name for name, residual in residuals.items() if residual.ops or treatment == "offload"]
    seen: Seen = {"LOOK": [], "PEEK": []}

    def look(context: OperationContext) -> None:
        seen["LOOK"].append({slot.name for slot in context.residuals if slot.kind == "residual"})

    def peek(context: OperationContext) -> None:
        seen["PEEK"].append({slot.name for slot in context.residuals if slot.kind == "residual"})

    declare(Operation(letters="LOOK", meaning="a look behind the forward", after=F, handler=look))
    declare(Operation(letters="PEEK", meaning="a look in front of the backward", before=B, handler=peek))
    plan = runs.even_plan(JOB, 1, microbatches=1)
    memory = MemoryPolicy(stages=({name: treatment for name in names},), ahead=ahead)
    return replace(plan, schedule_rows=("0F0 0LOOK0 0PEEK0 0B0",), memory=memory), seen


@pytest.mark.parametrize(("treatment", "ahead"), [("offload", ()), ("recompute", (0,)), ("recompute", ())])
def test_handlers_see_what_is_on_the_device(
    treatment: Treatment, ahead: tuple[int, ...], tmp_path: Path
) -> None:
    plan, seen = plan_of(treatment, ahead)
    losses = []
    for policy in (MemoryPolicy(), plan.memory):
        with Pipeline(JOB, replace(plan, memory=policy), options=Options(offload_dir=tmp_path)) as pipeline:
            losses += [pipeline.step(JOB.batch(step, 2)) for step in range(2)]
    assert losses[:2] == losses[2:]
    (kept, treated), named = [(seen["LOOK"][i], seen["PEEK"][i]) for i in (0, 2)], set(plan.memory.stages[0])
    assert kept[0] == kept[1] and named & kept[0]
    assert not named & treated[1]
