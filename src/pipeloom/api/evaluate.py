"""The stages in evaluation mode, made when the first batch is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import schedules
from ..ir.errors import BatchError
from ..ir.plan import Plan
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..lowering import lower
from ..runtime import PostedChannel, Variant, agree_on_layouts, signature_of
from ..tracer import Captured, Job, capture_evaluation, cut_evaluation
from .variants import make_variant


@dataclass(eq=False)
class Evaluating:
    """One rank's stages in evaluation mode, per size of micro-batch.

    like_training: gives a micro-batch's training stages, for a model that was cut between its modules: its
        stages run in either mode.
    """

    job: Job
    plan: Plan
    captured: Captured
    stages: StageGraph
    own_stages: tuple[int, ...]
    device: str
    autocast: torch.dtype | None
    like_training: Callable[[Mapping[str, Tensor]], Variant]
    channel: PostedChannel
    program: Program | None = None
    _variants: dict[tuple[str, ...], Variant] = field(default_factory=dict)

    def variant(self, part: Mapping[str, Tensor]) -> Variant:
        """The stages for one micro-batch; sets `program`.

        Raises: CaptureError or CutError if the model cannot be captured or cut in evaluation mode;
            BatchError if its stages exchange other values than for another size.
        """
        signature = signature_of(part)
        if signature not in self._variants:
            self._variants[signature] = self._made(part)
            program = self._lowered(self._variants[signature].stages)
            if self.program is not None and str(program) != str(self.program):
                raise BatchError(
                    f"in evaluation mode {', '.join(signature)} is computed in another way than other sizes",
                    hint="evaluate batches of one size",
                )
            self.program = program
        return self._variants[signature]

    def _made(self, part: Mapping[str, Tensor]) -> Variant:
        if self.captured.cut is not None:
            return self.like_training(part)
        evaluated = capture_evaluation(self.job, self.captured, part, autocast=self.autocast)
        stages = cut_evaluation(evaluated.graph, self.captured.graph, self.stages)
        agree_on_layouts(self.channel, stages)
        return make_variant(evaluated, self.plan, stages, self.own_stages, device=self.device)

    def _lowered(self, stages: StageGraph) -> Program:
        placement, count = self.plan.placement, self.plan.as_schedule.microbatches
        return lower(schedules.build("forward_only", stages, placement, count), stages)
