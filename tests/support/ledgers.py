"""Peaks of real runs by the ledger, beside what the planner's memory model predicts for the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from runs import capture_of, even, plan_for, threads
from torch import Tensor

from pipeloom import Job, Options, Pipeline, schedules
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import StageMemory
from pipeloom.planner import cpu_cluster
from pipeloom.planner.cost import CostModel, CostOptions
from pipeloom.profiler.roofline import roofline
from pipeloom.runtime import posting
from pipeloom.runtime.local_channel import LocalChannel, LocalTransport
from pipeloom.runtime.posting import Handle, Nothing

MICROBATCHES, SIZE = 4, 2


@contextmanager
def sends_are_through_at_once() -> Iterator[None]:
    """When a receiver takes a message, and so how long its sender keeps it, differs from run to run."""
    real = LocalTransport.send

    def send(self: LocalTransport, buffer: Tensor, target: int, index: int | None) -> Handle:
        real(self, buffer.clone(), target, index)
        return Nothing()

    with patch.object(LocalTransport, "send", send), patch.object(posting, "SMALL_BYTES", 0):
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
    model = _model(graph, 1)
    ops, points = len(model), model.cut_points
    cuts = [0]
    for stage in range(1, stages):
        near = [p for p in points if abs(p - stage * ops / stages) <= ops / stages / 2.5 and p > cuts[-1]]
        cuts.append(int(min(near, key=lambda p: (model.crossing_bytes[p], abs(p - stage * ops / stages)))))
    return {op.name: sum(c <= place for c in cuts) - 1 for place, op in enumerate(model.wiring.ops)}


def compare(job: Job, stages: int, schedule: str, *, evenly: bool = False) -> list[Peaks]:
    """Run two steps on threads; one entry per stage. evenly: cut by the number of ops alone.

    The optimizer is expected to keep one number per parameter (SGD with momentum).
    """
    captured = capture_of(job, SIZE)
    graph = captured.graph
    stage_of = (even if evenly else calm)(graph, stages)
    plan = plan_for(captured, stage_of, microbatches=MICROBATCHES, microbatch_size=SIZE, schedule=schedule)

    def work(rank: int, channel: LocalChannel) -> dict[str, int]:
        with Pipeline(job, plan, options=Options(), channel=channel) as pipeline:
            for seed in range(2):
                pipeline.step(job.batch(seed, MICROBATCHES * SIZE))
            return dict(pipeline.ledger.at_peak)

    with sends_are_through_at_once():
        measured = threads(stages, work)
    model = _model(graph, stages)
    cut = plan.stage_graph(graph)
    return [
        Peaks(predicted=model.stage(cut, stage, q).memory, measured=seen)
        for stage, (q, seen) in enumerate(zip(schedules.in_flight(plan.as_schedule), measured, strict=True))
    ]


def _model(graph: OpGraph, stages: int) -> CostModel:
    cluster = cpu_cluster(stages)
    profile = roofline(graph, cluster.devices[0])
    options = CostOptions(microbatches=MICROBATCHES, optimizer_bytes=1.0, sends_in_flight=0)
    return CostModel(graph, [profile] * stages, cluster, options)
