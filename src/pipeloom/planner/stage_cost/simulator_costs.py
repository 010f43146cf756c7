"""StageCost of each stage of a cut, for the simulator, from the planner's cost model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...ir.action import RECOMPUTE, STEP, B, F, I, W
from ...ir.costs import StageCost
from ...ir.memory_policy import Treatment
from ...ir.plan import StageMemory, StagePlan
from ...ir.stages import StageGraph
from ..treatments import treated_stage
from .model import CostModel
from .split_backward import Halves, halves_of
from .treated_stage import Treated

Treatments = Mapping[str, Treatment]


def stage_plan(
    model: CostModel,
    stages: StageGraph,
    index: int,
    in_flight: int,
    treatments: Treatments,
    *,
    ahead: bool = False,
) -> StagePlan:
    """As `CostModel.stage`, with treatments of residuals, by their names.

    ahead: whether it recomputes in front of its backward, not inside.
    """
    plain = model.stage(stages, index, in_flight)
    found = _treated(model, stages, index, treatments)
    if found is None:
        return replace(plain, kept_bytes=round(model.footprint(stages, index).residuals))
    return replace(
        plain,
        recompute_s=found.recompute_s,
        offload_s=found.offload_s,
        reload_s=found.reload_s,
        memory=StageMemory(
            **{k: round(v) for k, v in found.memory_parts(model, in_flight, ahead=ahead).items()}
        ),
        kept_bytes=round(found.footprint.residuals - found.offloaded - found.recomputed),
        recomputed_bytes=round(found.recomputed),
        offloaded_bytes=round(found.offloaded),
    )


def stage_costs(
    model: CostModel,
    stages: StageGraph,
    parts: Sequence[StagePlan],
    treatments: Sequence[Treatments] = (),
    *,
    ahead: Collection[int] = (),
    split: bool = True,
) -> tuple[StageCost, ...]:
    """What the simulator needs to know of each stage.

    parts: the stages as `model.stage`, or `stage_plan`, gives them.  treatments: by stage, () for none.
    ahead: stages that recompute in front of their backward; for others that is part of its time and scratch.
    split: whether a backward may be split; if none is, what I and W hold is not looked at.
    """
    given = treatments or ({},) * len(parts)
    return tuple(
        _stage_cost(model, stages, part, _treated(model, stages, index, own), (index, index in ahead), split)
        for index, (part, own) in enumerate(zip(parts, given, strict=True))
    )


def _treated(model: CostModel, stages: StageGraph, index: int, treatments: Treatments) -> Treated | None:
    """None if everything is kept.

    Raises: PlanError if a name is not that of a residual of the stage that planners know.
    """
    if all(treatment == "keep" for treatment in treatments.values()):
        return None
    footprint = model.footprint(stages, index)
    place = model.wiring.position
    positions = [place[name] for name in stages.stages[index].ops if name in place]
    return treated_stage(model, footprint, positions, index, treatments)


def _stage_cost(
    model: CostModel,
    stages: StageGraph,
    part: StagePlan,
    found: Treated | None,
    place: tuple[int, bool],
    split: bool,
) -> StageCost:
    """found: its treatments, if there are any.  place: its number, and whether it recomputes ahead."""
    index, ahead = place
    footprint = found.footprint if found else model.footprint(stages, index)
    forward, backward = map(round, footprint.transient)
    again, inside_s = 0, part.recompute_s
    residual = footprint.residuals - (found.recomputed if found else 0)
    if found and ahead:
        again, inside_s = int(found.recomputed), 0.0
        backward, residual = round(found.restored), footprint.residuals
    halves = _halves(model, stages, index) if split else Halves(0.0, 0.0, 0.0)
    ingoing = max(0, round(halves.ingoing - footprint.received_grads))
    weights = round(halves.weights)
    if found:  # what is made again inside is not looked at by halves
        ingoing, weights = max(ingoing, backward), max(weights, backward)
    memory = part.memory
    batch = sum(value.bytes for value in model.graph.inputs) * model.options.microbatches
    return StageCost(
        forward_s=part.forward_s,
        backward_s=part.input_grad_s + part.weight_grad_s + inside_s,
        input_grad_s=part.input_grad_s + inside_s,
        weight_grad_s=part.weight_grad_s,
        step_s=_step_s(model, index, part),
        residual_bytes=int(residual),
        offloaded_bytes=int(found.offloaded) if found else 0,
        recomputed_bytes=again,
        recompute_s=part.recompute_s - inside_s,
        offload_s=part.offload_s,
        reload_s=part.reload_s,
        keeps_inputs=bool(footprint.kept > 0),
        carried_bytes=round(halves.carried),
        static_bytes={
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "buffers": memory.buffers - batch,
            "batch": batch,
        },
        transient_bytes={
            F: forward,
            B: backward,
            I: ingoing,
            W: weights,
            STEP: int(footprint.largest),
            RECOMPUTE: round(found.again) if found and ahead else 0,
        },
        tied_bytes={
            name: model.graph.parameter[name].bytes for name in stages.params[index] if name in stages.tied
        },
    )


def _step_s(model: CostModel, index: int, part: StagePlan) -> float:
    """The optimizer as a memory-bound pass: parameters and states read and written, gradients read."""
    bandwidth = model.cluster.devices[index].memory_bytes_per_s
    moved = 3 * part.memory.gradients + 2 * part.memory.optimizer
    return moved / bandwidth if bandwidth > 0 else 0.0


def _halves(model: CostModel, stages: StageGraph, index: int) -> Halves:
    place = model.wiring.position
    positions = [place[name] for name in stages.stages[index].ops if name in place]
    return halves_of(model.sweep, positions, [op.target for op in model.wiring.ops])
