"""What ends a step: REDUCE, the all-reduce of tied gradients; clipping; and STEP, the optimizer."""

from __future__ import annotations

from ..ir.action import StageAction
from ..ir.tied_gradients import reductions
from .step_state import StepContext
from .weights import clip_factor


class ReduceAndStep:
    """Handlers of REDUCE and STEP.

    clip_norm: limit of the gradients' global norm; None for no limit.  grad_norm: that norm, last time.
    updating: whether the optimizer may have updated some parameters and not others; whoever calls the worker
        sets it back once the call is over.
    """

    def __init__(self, clip_norm: float | None) -> None:
        self.clip_norm = clip_norm
        self.grad_norm: float | None = None
        self.updating = False

    def reduce_tied_gradients(self, step: StepContext, action: StageAction) -> None:
        """REDUCE: add the gradients of each tied parameter over the ranks that have a replica of it.

        All ranks go through the tied parameters in the same order, so that none blocks: `ir.tied_gradients`.
        """
        if not step.update:
            return
        gradients = step.weights.grads
        with step.recorder.record("recv", str(action)):
            for tie in reductions(step.stages, step.placement)[step.rank]:
                if tie.name in gradients.sums:
                    step.channel.all_reduce(gradients.total(tie.name), tie.ranks)

    def step(self, step: StepContext, action: StageAction) -> None:
        """STEP: clip, then update. The optimizer holds all stages of the rank: it runs at the last STEP of
        the row."""
        last = max(s for s, rank in enumerate(step.placement) if rank == step.rank)
        if not step.update or action.stage != last:
            return
        if self.clip_norm is not None:
            self._clip(step, self.clip_norm)
        self.updating = True
        with step.recorder.record("compute", str(action)):
            step.weights.step()
        step.ledger.set("optimizer", step.weights.sizes["optimizer"], str(action))
        step.ledger.during(str(action), step.weights.step_bytes, {})

    def _clip(self, step: StepContext, limit: float) -> None:
        """Scale gradients by the norm over all ranks; a tied parameter counts once, on its lowest rank."""
        tied, placement = step.stages.tied, step.placement
        counted_here = [
            name
            for name in step.weights.grads.sums
            if name not in tied or step.rank == min(placement[stage] for stage in tied[name])
        ]
        squares = step.weights.norm_squares(counted_here).reshape(1)
        with step.recorder.record("recv", "CLIP"):
            step.channel.all_reduce(squares)
        self.grad_norm = float(squares.sqrt())
        factor = clip_factor(self.grad_norm, limit)
        if factor < 1.0:
            step.weights.scale_gradients(factor)
