"""Peaks of real runs by the ledger, beside what the planner's memory model predicts for the plan."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from unittest.mock import patch

from parts import model_of
from runs import capture_of, each_rank, plan_for
from torch import Tensor

from pipeloom import Job, Pipeline, forecast, planning
from pipeloom.ir.action import W
from pipeloom.ir.cluster import Link
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan, StageMemory, StagePlan
from pipeloom.ir.stages import StageGraph
from pipeloom.lowering.passes import lower
from pipeloom.planner.stage_cost.model import CostModel
from pipeloom.planner.stage_cost.stage_estimate import estimate_stage
from pipeloom.runtime import channel as posting
from pipeloom.runtime.transport import GlooTransport, PendingTransfer, ended_transfer
from pipeloom.schedules import registry
from pipeloom.simulator.simulate import simulate

MICROBATCHES, SIZE = 4, 2


@contextmanager
def sends_are_through_at_once() -> Iterator[None]:
    """When a receiver takes a message, and so how long its sender keeps it, differs from run to run."""
    real, under_way = GlooTransport.send, list[PendingTransfer]()

    def send(self: GlooTransport, buffer: Tensor, target: int, index: int) -> PendingTransfer:
        under_way.append(real(self, buffer.clone(), target, index))
        return ended_transfer()

    none_held = patch.object(forecast, "SMALL_BYTES", None)
    with patch.object(GlooTransport, "send", send), patch.object(posting, "SMALL_BYTES", 0), none_held:
        yield


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Of one stage: what was predicted, and what the ledger saw at its peak, in bytes by kind."""

    predicted: StageMemory
    measured: Mapping[str, int]

    @property
    def error(self) -> float:
        """Relative; above 0 where too much was predicted."""
        return self.predicted.total / sum(self.measured.values()) - 1


def calm(graph: OpGraph, stages: int) -> dict[str, int]:
    """Ops to stages: near an even cut, where the fewest bytes cross, as a planner would cut."""
    model = model_of(graph, 1)
    ops, points, crossing = len(model), model.cut_points, model.tables.crossing_bytes
    cuts = [0]
    for stage in range(1, stages):
        near = [p for p in points if abs(p - stage * ops / stages) <= ops / stages / 2.5 and p > cuts[-1]]
        cuts.append(int(min(near, key=lambda p: (crossing[p], abs(p - stage * ops / stages)))))
    return {op.name: sum(c <= place for c in cuts) - 1 for place, op in enumerate(model.readers.ops)}


def compare(job: Job, stages: int, schedule: str) -> list[Peaks]:
    """Run two steps on threads; one entry per stage.

    Of a schedule that splits its backwards the peaks are those of the simulated step.
    """
    captured = capture_of(job, SIZE)
    graph = planning.with_updates(captured.graph, job)
    stage_of = calm(graph, stages)
    plan = plan_for(captured, stage_of, microbatches=MICROBATCHES, microbatch_size=SIZE, schedule=schedule)

    model, cut = model_of(graph, stages), plan.stage_graph(graph)
    in_flight = registry.in_flight(plan.as_schedule)
    parts = [estimate_stage(model, cut, stage).plan(q) for stage, q in enumerate(in_flight)]
    predicted = [part.memory for part in parts]
    if any(action.kind == W for row in plan.as_schedule.rows for action in row):
        predicted = _simulated(model, cut, plan, parts)

    def work(pipeline: Pipeline) -> dict[str, int]:
        for seed in range(2):
            pipeline.step(job.batch(seed, MICROBATCHES * SIZE))
        return dict(pipeline.ledger.at_peak)

    with sends_are_through_at_once():
        measured = each_rank(job, plan, work)
    return [Peaks(predicted=memory, measured=seen) for memory, seen in zip(predicted, measured, strict=True)]


def _simulated(
    model: CostModel, cut: StageGraph, plan: Plan, parts: Sequence[StagePlan]
) -> list[StageMemory]:
    """The peaks of a step in which messages take no time."""
    cluster = replace(model.cluster, within_node=Link(bandwidth_bytes_per_s=inf))
    costs = tuple(estimate_stage(model, cut, index).simulator_cost(part) for index, part in enumerate(parts))
    step = simulate(lower(plan.as_schedule, cut), cut, costs, cluster)
    found = []
    for peak in step.peaks:
        sizes = dict(peak)
        sizes["buffers"] += sizes.pop("batch")
        found.append(StageMemory(**sizes))
    return found
