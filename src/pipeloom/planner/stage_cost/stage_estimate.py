"""One stage of a cut, with treatments: its part of a plan, and its costs for the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...ir.action import RECOMPUTE, STEP, B, F, I, W
from ...ir.costs import StageCost
from ...ir.memory_policy import Treatment
from ...ir.plan import StageMemory, StagePlan
from ...ir.stages import StageGraph
from .model import CostModel
from .peak_memory import Footprint, RecomputeAhead, predict_peak_memory
from .split_backward import SplitBackward
from .treated_stage import TreatedStage, cost_treatments


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """What one stage takes and holds, worked out once; made by `estimate_stage`.

    kept: its footprint with every residual kept.  treated: with its treatments; None if there are none.
    """

    model: CostModel
    stages: StageGraph
    index: int
    kept: Footprint[float]
    treated: TreatedStage | None

    @property
    def footprint(self) -> Footprint[float]:
        """The bytes of the stage with its treatments."""
        return self.treated.footprint if self.treated else self.kept

    @cached_property
    def seconds(self) -> tuple[float, float, float]:
        """See `CostModel.stage_seconds`."""
        return self.model.stage_seconds(self.stages, self.index)

    @cached_property
    def split_backward(self) -> SplitBackward:
        """What I and W hold, with everything kept."""
        return self.model.split_backward(self.model.positions(self.stages, self.index))

    def plan(self, in_flight: int, *, ahead: bool = False, turn_s: float = 0.0) -> StagePlan:
        """The stage in a plan.

        in_flight: micro-batches whose residuals it holds at its peak.  ahead: whether it recomputes in front
        of its backward, not inside.  turn_s: see `StagePlan`.
        """
        treated, footprint = self.treated, self.footprint
        forward_s, input_grad_s, weight_grad_s = self.seconds
        memory = self.peak_memory(in_flight, ahead=ahead)
        return StagePlan(
            ops=self.stages.stages[self.index].ops,
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            recompute_s=treated.recompute_s if treated else 0.0,
            offload_s=treated.offload_s if treated else 0.0,
            reload_s=treated.reload_s if treated else 0.0,
            turn_s=turn_s,
            kept_bytes=round(float(footprint.residuals)),
            recomputed_bytes=round(footprint.recomputed),
            offloaded_bytes=round(footprint.offloaded),
            memory=memory,
        )

    def peak_memory(self, in_flight: int, *, ahead: bool = False) -> StageMemory:
        """Predicted bytes at its peak; see `plan`."""
        scratch: RecomputeAhead | None = self.treated.ahead if self.treated and ahead else None
        parts = predict_peak_memory(self.footprint, self.model.options, in_flight, scratch)
        return StageMemory(**{kind: round(float(size)) for kind, size in parts.items()})

    def simulator_cost(self, plan: StagePlan, *, ahead: bool = False, split: bool = True) -> StageCost:
        """What the simulator needs to know of the stage.

        plan: the stage as `plan` makes it.  ahead: as there; if not, recomputing is part of the backward's
        time and scratch.  split: whether a backward may be split; if none is, what I and W hold is not looked
        at.
        """
        treated, footprint = self.treated, self.footprint
        ahead = ahead and treated is not None
        inside_s = 0.0 if ahead else plan.recompute_s
        memory, batch = plan.memory, self.model.batch_bytes
        held = footprint.residuals + footprint.offloaded + (footprint.recomputed if ahead else 0.0)
        return StageCost(
            forward_s=plan.forward_s,
            backward_s=plan.input_grad_s + plan.weight_grad_s + inside_s,
            input_grad_s=plan.input_grad_s + inside_s,
            weight_grad_s=plan.weight_grad_s,
            step_s=self._step_s(plan),
            residual_bytes=int(held),
            offloaded_bytes=int(footprint.offloaded),
            recomputed_bytes=int(footprint.recomputed) if ahead else 0,
            recompute_s=plan.recompute_s - inside_s,
            offload_s=plan.offload_s,
            reload_s=plan.reload_s,
            keeps_inputs=bool(footprint.saved_inputs > 0),
            carried_bytes=round(self.split_backward.carried) if split else 0,
            static_bytes={
                "parameters": memory.parameters,
                "gradients": memory.gradients,
                "optimizer": memory.optimizer,
                "buffers": memory.buffers - batch,
                "batch": batch,
            },
            transient_bytes=self._transient_bytes(ahead, split),
            tied_bytes={
                name: self.model.graph.parameter[name].bytes
                for name in self.stages.params[self.index]
                if name in self.stages.tied and self.model.graph.parameter[name].trainable
            },
        )

    def _transient_bytes(self, ahead: bool, split: bool) -> dict[str, int]:
        """Most scratch of each kind of action; see `simulator_cost`."""
        treated, footprint = self.treated, self.footprint
        scratch = treated.ahead if treated and ahead else RecomputeAhead(0.0, footprint.backward_transient)
        backward = round(scratch.backward)
        input_grad, weight_grad = 0, 0
        if split:
            halves = self.split_backward
            input_grad = max(0, round(halves.input_grad - footprint.received_grads))
            weight_grad = round(halves.weight_grad)
        if treated:  # the sweep of the split backward knows nothing of what is recomputed inside it
            input_grad, weight_grad = max(input_grad, backward), max(weight_grad, backward)
        return {
            F: round(float(footprint.forward_transient)),
            B: backward,
            I: input_grad,
            W: weight_grad,
            STEP: int(footprint.step),
            RECOMPUTE: round(scratch.recompute),
        }

    def _step_s(self, plan: StagePlan) -> float:
        """The optimizer as a memory-bound pass: parameters and states read and written, gradients read."""
        bandwidth = self.model.cluster.devices[self.index].memory_bytes_per_s
        moved = 3 * plan.memory.gradients + 2 * plan.memory.optimizer
        return moved / bandwidth if bandwidth > 0 else 0.0


def estimate_stage(
    model: CostModel, stages: StageGraph, index: int, treatments: Mapping[str, Treatment] | None = None
) -> StageEstimate:
    """One stage of any cut.  treatments: of its residuals, by their names; those not named are kept.

    Raises: PlanError if a name is not that of a residual of the stage that planners know, or the residual
    cannot be treated so.
    """
    kept = model.stage_footprint(stages, index)
    treated = None
    if treatments and any(treatment != "keep" for treatment in treatments.values()):
        treated = cost_treatments(model, kept, model.positions(stages, index), index, treatments)
    return StageEstimate(model=model, stages=stages, index=index, kept=kept, treated=treated)
