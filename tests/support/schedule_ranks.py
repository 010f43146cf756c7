"""What each rank runs where schedules are tried on real processes, beside plain PyTorch in one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from every_schedule import gpt_job, plan_of
from runs import Numbers, difference, merged, plain, shared_captures
from torch import Tensor

from pipeloom import Options, Pipeline
from pipeloom.ir.plan import Plan, widened
from pipeloom.runtime.connect import connect
from pipeloom.tracer.job import Job

STEPS = 2


def compare_each(
    names: Sequence[str], microbatches: int, dtype: str, file: Path, width: int = 1, shard: bool = False
) -> None:
    """Train and evaluate with every schedule. Rank 0 writes {name: {what: largest relative difference}}.

    width: pipelines side by side, which share the micro-batches.  shard: and the optimizer's state.
    """
    torch.set_num_threads(1)
    ranks = connect(torch.device("cpu"), timeout_s=300).size()
    job = gpt_job(layers=2, width=32, dtype=getattr(torch, dtype))
    batches = [job.batch(seed, 2 * microbatches) for seed in range(STEPS)]
    expected = plain(job, batches, microbatches, evaluate=batches[:1])
    untrained = plain(job, [], microbatches, evaluate=batches[:1])
    table = {}
    with shared_captures():
        for name in names:
            each = microbatches // width
            plan = widened(plan_of(job, name, ranks // width, microbatches=each, microbatch_size=2), width)
            plan = replace(plan, shard_optimizer=shard)
            if name == "forward_only":
                with Pipeline(job, plan) as pipeline:
                    found = {"evaluation": _relative([pipeline.evaluate(batches[0])], untrained.evaluated)}
            else:
                found = _train(job, plan, batches, expected)
            table[name] = found
    if dist.get_rank() == 0:
        file.write_text(json.dumps(table))


def _train(job: Job, plan: Plan, batches: list[dict[str, Tensor]], expected: Numbers) -> dict[str, float]:
    with Pipeline(job, plan, options=Options(keep_gradients=True)) as pipeline:
        losses = [pipeline.step(batch) for batch in batches]
        evaluated = [pipeline.evaluate(batches[0])]
        mine = (pipeline.weights.last_gradients, {n: p.detach() for n, p in pipeline.weights.params.items()})
        everyone = pipeline.channel.all_gather_object(mine)
    gradients, parameters = (merged([part[k] for part in everyone]) for k in (0, 1))
    return {
        "loss": _relative(losses, expected.losses),
        "evaluation": _relative(evaluated, expected.evaluated),
        "gradients": difference(gradients, expected.gradients)[0],
        "parameters": difference(parameters, expected.parameters)[0],
    }


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def resume_elsewhere(folder: Path) -> None:
    """Save checkpoints of schedules that hold every stage twice, and go on with others."""
    job = gpt_job()
    batches = [job.batch(seed, 4) for seed in range(3)]
    both_ways, line = (plan_of(job, name, 2, microbatches=4) for name in ("dualpipe", "1f1b"))
    shared = replace(widened(plan_of(job, "1f1b", 1, microbatches=2), 2), shard_optimizer=True)
    expected = plain(job, batches, 4).losses[2]
    for number, (before, after) in enumerate([(both_ways, line), (shared, line), (line, shared)]):
        with shared_captures():
            with Pipeline(job, before) as pipeline:
                for batch in batches[:2]:
                    pipeline.step(batch)
                pipeline.save(folder / str(number))
            with Pipeline(job, after) as pipeline:
                pipeline.load(folder / str(number))
                loss = pipeline.step(batches[2])
        assert loss == pytest.approx(expected, rel=1e-12)
