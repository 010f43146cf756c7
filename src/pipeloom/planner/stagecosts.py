"""StageCost of each stage of a cut, for the simulator, from the planner's cost model."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.action import STEP, B, F, I, W
from ..ir.costs import StageCost
from ..ir.plan import StagePlan
from ..ir.stages import StageGraph
from .cost import CostModel


def stage_costs(model: CostModel, stages: StageGraph, parts: Sequence[StagePlan]) -> tuple[StageCost, ...]:
    """What the simulator needs to know of each stage.

    parts: the stages as `model.stage` gives them.
    """
    return tuple(_stage_cost(model, stages, index, part) for index, part in enumerate(parts))


def _stage_cost(model: CostModel, stages: StageGraph, index: int, part: StagePlan) -> StageCost:
    footprint = model.footprint(stages, index)
    memory = part.memory
    forward, backward = map(round, footprint.transient)
    batch = sum(value.bytes for value in model.graph.inputs) * model.options.microbatches
    return StageCost(
        forward_s=part.forward_s,
        backward_s=part.input_grad_s + part.weight_grad_s,
        input_grad_s=part.input_grad_s,
        weight_grad_s=part.weight_grad_s,
        step_s=_step_s(model, index, part),
        residual_bytes=int(footprint.residuals),
        keeps_inputs=footprint.kept > 0,
        carried_bytes=_carried_bytes(model, stages, index),
        static_bytes={
            "parameters": memory.parameters, "gradients": memory.gradients,
            "optimizer": memory.optimizer, "buffers": memory.buffers - batch, "batch": batch,
        },
        transient_bytes={F: forward, B: backward, I: backward, W: backward, STEP: int(footprint.largest)},
        tied_bytes={
            name: model.graph.parameter[name].bytes for name in stages.params[index] if name in stages.tied
        },
    )  # fmt: skip


def _step_s(model: CostModel, index: int, part: StagePlan) -> float:
    """The optimizer as a memory-bound pass: parameters and states read and written, gradients read."""
    bandwidth = model.cluster.devices[index].memory_bytes_per_s
    moved = 3 * part.memory.gradients + 2 * part.memory.optimizer
    return moved / bandwidth if bandwidth > 0 else 0.0


def _carried_bytes(model: CostModel, stages: StageGraph, index: int) -> int:
    """Bytes between I and W of one micro-batch: for each op that has a weight gradient, the inputs that it
    saved and the gradients of its outputs."""
    graph = model.graph
    kept: dict[str, int] = {}
    for name in stages.stages[index].ops:
        if model.profile.costs[name].weight_grad_s > 0:
            op = graph.op[name]
            made = {v.name for v in op.outputs}
            kept |= {v: graph.value[v].bytes for v in model.saves.get(name, ()) if v not in made}
            kept |= {f"gradient of {v.name}": v.bytes for v in op.outputs}
    return sum(kept.values())
