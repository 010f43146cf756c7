"""What the stages of a cut keep and need: by the memory model, and by their own traced graphs."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.action import B, F
from pipeloom.ir.stages import StageGraph
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage
from pipeloom.profiler.roofline import roofline
from pipeloom.runtime.ledger import crossing_bytes
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.stage.trace import stage_functions


class Bytes(NamedTuple):
    """Of one micro-batch of a stage. inputs: whether what it receives stays until the backward.

    forward, backward: the most there is in it, residuals and messages that it makes included.
    """

    residuals: int
    inputs: bool
    forward: int
    backward: int


class StageBytes(NamedTuple):
    """One stage, planned and as traced."""

    ops: tuple[str, ...]
    planned: Bytes
    own: Bytes


def stage_bytes(captured: Captured, stages: StageGraph) -> list[StageBytes]:
    """All stages of a cut, with nothing recomputed or offloaded."""
    count = len(stages.stages)
    cluster = cpu_cluster(count)
    profile = roofline(captured.graph, cluster.devices[0])
    model = CostModel(captured.graph, [profile] * count, cluster, CostOptions(microbatches=1))
    found = []
    for index in range(count):
        estimate = estimate_stage(model, stages, index)
        cost = estimate.simulator_cost(estimate.plan(1), split=False)
        functions = stage_functions(captured, stages, index)
        sent, back = crossing_bytes(stages, index)
        held, most = cost.residual_bytes, functions.peak_bytes
        own = sum(functions.residual_bytes.values())
        planned = Bytes(
            residuals=held,
            inputs=cost.keeps_inputs,
            forward=held + sent + cost.transient_bytes[F],
            backward=held + back + cost.transient_bytes[B],
        )
        traced = Bytes(
            residuals=own,
            inputs=not functions.kept_inputs.isdisjoint(functions.received),
            forward=max(own + sent, most["forward"]),
            backward=own + max(back, most.get("backward", 0)),
        )
        found.append(StageBytes(stages.stages[index].ops, planned, traced))
    return found
