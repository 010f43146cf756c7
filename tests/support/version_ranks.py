"""What each rank runs where pipelines that do not drain are saved, and go on at another depth or width."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from delayed import STEPS, delayed, job_of, steady_plan
from runs import difference, shared_captures

from pipeloom import Job, Pipeline
from pipeloom.ir.plan import Plan, widened
from pipeloom.runtime.connect import connect

RANKS, MICROBATCHES = 4, 4
SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2))
"""Depth and width."""


@dataclass(frozen=True)
class Segment:
    """Batches that one pipeline trains before the next one loads what it has saved.

    shape: depth and width.  steps: batches, by number.  drains: after which of them it is asked to evaluate.
    spoils: after saving it trains on, and then loads its own checkpoint.
    """

    shape: tuple[int, int]
    steps: range
    drains: frozenset[int] = frozenset()
    spoils: bool = False


Script = tuple[Segment, ...]


def plan_of_shape(job: Job, shape: tuple[int, int]) -> Plan:
    depth, width = shape
    return widened(steady_plan(job, depth, MICROBATCHES // width), width)


def walk(scripts: Sequence[Script], folder: Path) -> None:
    """For each script rank 0 writes its losses and those of one process, and how far parameters are apart."""
    torch.set_num_threads(1)
    connect(torch.device("cpu"), timeout_s=600)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, RANKS + 1)}
    job, table = job_of(), []
    with shared_captures():
        expected = delayed(job, MICROBATCHES) if dist.get_rank() == 0 else None
        for number, script in enumerate(scripts):
            losses: list[float] = []
            for segment in script:
                depth, width = segment.shape
                group = groups[depth * width]
                if dist.get_rank() < depth * width:
                    with Pipeline(job, plan_of_shape(job, segment.shape), group=group) as pipeline:
                        losses, own = _train(job, pipeline, segment, folder / str(number), losses)
                        parts = pipeline.channel.all_gather_object(own)
                dist.barrier()
            if expected is not None:
                merged = {name: tensor for part in parts for name, tensor in part.items()}
                worst, _ = difference(merged, expected.parameters)
                table.append({"found": losses, "expected": expected.losses, "parameters": worst})
    if dist.get_rank() == 0:
        (folder / "table.json").write_text(json.dumps(table))


def _train(
    job: Job, pipeline: Pipeline, segment: Segment, folder: Path, losses: list[float]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    if segment.steps.start:
        pipeline.load(folder)
        assert pipeline.steps_done == segment.steps.start

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for step in segment.steps:
            yield job.batch(step, 2 * MICROBATCHES)
            if step in segment.drains:
                pipeline.evaluate(job.batch(0, 2 * MICROBATCHES))

    seen = [report.loss for report in pipeline.steps(batches())]
    pipeline.save(folder)
    if segment.spoils:
        list(pipeline.steps([job.batch(100 + n, 2 * MICROBATCHES) for n in range(2)]))
        pipeline.load(folder)
        assert pipeline.steps_done == segment.steps.stop
    parameters = {name: p.detach().clone() for name, p in pipeline.weights.params.items()}
    return losses + seen, parameters


def ends_at(stops: Sequence[int]) -> list[range]:
    """All steps, cut behind some of them."""
    bounds = [0, *sorted(set(stops) - {STEPS}), STEPS]
    return [range(low, high) for low, high in zip(bounds, bounds[1:], strict=False)]
