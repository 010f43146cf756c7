"""What a stage takes by the planner's model, and by the graphs that its rank runs, part by part."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.action import B, F, I, W
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.memory_policy import Treatment
from pipeloom.ir.stages import StageGraph
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.peak_memory import CostOptions
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage, stage_liveness
from pipeloom.profiler.roofline import roofline
from pipeloom.runtime.ledger import crossing_bytes
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.stage.trace import stage_functions


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes of one stage for one micro-batch, as `ir.costs.StageCost` has them.

    whole: all that the stage holds with one micro-batch in flight, to weigh differences against.
    """

    residuals: tuple[int, int]
    forward: tuple[int, int]
    backward: tuple[int, int]
    keeps_inputs: tuple[bool, bool]
    carried: tuple[int, int]
    ingoing: tuple[int, int]
    weights: tuple[int, int]
    whole: int

    @property
    def error(self) -> float:
        """Of the worse moment, relative to the whole; above 0 where the model has too much."""
        planned, real = (self.residuals[k] + max(self.forward[k], self.backward[k]) for k in (0, 1))
        return (planned - real) / self.whole


def model_of(graph: OpGraph, stages: int) -> CostModel:
    cluster = cpu_cluster(stages)
    profile = roofline(graph, cluster.devices[0])
    options = CostOptions(microbatches=4, sends_in_flight=0)
    return CostModel(graph, [profile] * stages, cluster, options)


def parts_of(
    captured: Captured,
    model: CostModel,
    stages: StageGraph,
    index: int,
    treatments: Mapping[str, Treatment],
    *,
    ahead: bool = False,
) -> Parts:
    """One stage with treatments of its residuals."""
    estimate = estimate_stage(model, stages, index, treatments)
    plan = estimate.plan(1, ahead=ahead)
    planned = estimate.simulator_cost(plan, ahead=ahead)
    real = stage_functions(captured, stages, index, treatments=treatments, ahead=ahead)
    sent, back = crossing_bytes(stages, index)
    residual = sum(real.residual_bytes.values())
    kept = residual - sum(real.residual_bytes[name] for name in real.recomputed)
    peak = real.peak_bytes
    return Parts(
        residuals=(planned.residual_bytes, residual),
        forward=(planned.transient_bytes[F], max(0, peak["forward"] - kept - sent)),
        backward=(planned.transient_bytes[B], max(0, peak.get("backward", 0) - back)),
        keeps_inputs=(planned.keeps_inputs, not real.kept_inputs.isdisjoint(real.received)),
        carried=(planned.carried_bytes, real.carried_bytes),
        ingoing=(planned.transient_bytes[I], max(0, peak.get("input_grad", 0) - back)),
        weights=(planned.transient_bytes[W], max(0, peak.get("weight_grad", 0))),
        whole=plan.memory.total,
    )


def some_recomputed(
    model: CostModel, stages: StageGraph, index: int, share: float, seed: int
) -> dict[str, Treatment]:
    """A random share of the residuals of a stage, an interval of ops, that can be made again."""
    footprint = model.stage_footprint(stages, index)
    found = stage_liveness(model, footprint, model.positions(stages, index), index).residuals
    draw = random.Random(seed)
    return {
        name: "recompute"
        for name, may in zip(found.names, found.may, strict=True)
        if may and draw.random() < share
    }
