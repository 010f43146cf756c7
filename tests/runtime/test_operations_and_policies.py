"""What a handler finds of a micro-batch's residuals where the plan treats some of them."""

from dataclasses import replace
from functools import partial

import nets
import pytest
import runs

from pipeloom import Options, Pipeline
from pipeloom.ir.action import B, F
from pipeloom.ir.memory_policy import MemoryPolicy, Treatment
from pipeloom.ir.operation import Operation, declare
from pipeloom.ir.plan import Plan
from pipeloom.runtime.operations import OperationContext

JOB = nets.job("skips")
Seen = dict[str, list[set[str]]]

ROWS = {
    "recompute": "0F0 0LOOK0 0PEEK0 0B0",
    # With two copies at once OFFLOAD0 has ended when F2 begins, and RELOAD0 comes in front of F3.
    "offload": "0F0 0F1 0F2 0PEEK0 0F3 0LOOK0 0B0 0LOOK1 0PEEK1 0B1 0LOOK2 0PEEK2 0B2 0LOOK3 0PEEK3 0B3",
}
"""A look behind the forward of the first micro-batch, or in front of its backward, is a PEEK where nothing is
to be on the device that is treated."""


def plan_of(treatment: Treatment, ahead: tuple[int, ...]) -> tuple[Plan, Seen]:
    """One stage, and a LOOK and a PEEK between the forward and the backward of its first micro-batch."""
    row = ROWS[treatment]
    plan = runs.even_plan(JOB, 1, microbatches=row.count("F"))
    residuals = runs.residuals_of(JOB, plan)
    names = [name for name, residual in residuals.items() if residual.ops or treatment == "offload"]
    seen: Seen = {"LOOK": [], "PEEK": []}

    def note(letters: str, context: OperationContext) -> None:
        seen[letters].append({slot.name for slot in context.residuals if slot.kind == "residual"})

    for letters, where in (("LOOK", {"after": F}), ("PEEK", {"before": B})):
        declare(Operation(letters=letters, meaning="a look", handler=partial(note, letters), **where))
    memory = MemoryPolicy(stages=({name: treatment for name in names},), ahead=ahead, at_once=2)
    return replace(plan, schedule_rows=(row,), memory=memory), seen


@pytest.mark.parametrize(("treatment", "ahead"), [("offload", ()), ("recompute", (0,)), ("recompute", ())])
def test_handlers_see_what_is_on_the_device(treatment, ahead, tmp_path) -> None:
    plan, seen = plan_of(treatment, ahead)
    losses = []
    for policy in (MemoryPolicy(), plan.memory):
        with Pipeline(JOB, replace(plan, memory=policy), options=Options(offload_dir=tmp_path)) as pipeline:
            losses += [pipeline.step(JOB.batch(step, 2 * plan.microbatches)) for step in range(2)]
    assert losses[:2] == losses[2:]
    named, third = set(plan.memory.stages[0]), 2 * plan.microbatches
    assert seen["LOOK"][0] == seen["PEEK"][0] and named & seen["LOOK"][0]
    assert not named & seen["PEEK"][third]  # by the first micro-batch of the third step
