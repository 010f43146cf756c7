"""One rank's stages for one size of micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.memory_policy import KEEP_ALL, MemoryPolicy
from ..ir.plan import Plan
from ..ir.stages import StageGraph
from ..runtime import Variant
from ..tracer import Captured, stage_functions


def make_variant(
    captured: Captured,
    plan: Plan,
    stages: StageGraph,
    own_stages: Sequence[int],
    *,
    device: str,
    compiled: bool = False,
    policy: MemoryPolicy = KEEP_ALL,
) -> Variant:
    """Build the functions of the stages that a rank owns.

    stages: one replica of them.  own_stages: of all replicas; those of one stage share its functions.
    policy: what becomes of residuals; in evaluation mode there are none.
    """
    origins = dict.fromkeys(stages.origin(s) for s in own_stages)
    made = {
        s: stage_functions(
            captured,
            stages,
            s,
            device=device,
            compiled=compiled,
            treatments=policy.of_stage(s),
            ahead=s in policy.ahead,
        )
        for s in origins
    }
    functions = {s: made[stages.origin(s)] for s in own_stages}
    return Variant(stages=plan.replicated(stages), functions=functions)
