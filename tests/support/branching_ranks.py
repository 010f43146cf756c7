"""What each rank runs where the models of `bench/graphpipe.py` are trained on real processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import graphpipe
import torch
import torch.distributed as dist

from pipeloom import Job, Pipeline
from pipeloom.ir.plan import Plan
from pipeloom.runtime.connect import connect


def small_job(name: str) -> Job:
    """A small model, trained by plain SGD where it does not say by what."""
    job = graphpipe.SMALL[name]()
    return replace(job, optimizer=job.optimizer or (lambda params: torch.optim.SGD(params, lr=0.05)))


def train_each(plans: Mapping[str, Plan], steps: int, file: Path) -> None:
    """Train each small model by its plan, on so many batches. Rank 0 writes {name: losses}."""
    torch.set_num_threads(1)
    connect(torch.device("cpu"), timeout_s=300)
    losses = {}
    for name, plan in plans.items():
        job = small_job(name)
        batches = [job.batch(seed, plan.microbatches * plan.microbatch_size) for seed in range(steps)]
        with Pipeline(job, plan) as pipeline:
            losses[name] = [pipeline.step(batch) for batch in batches]
    if dist.get_rank() == 0:
        file.write_text(json.dumps(losses))
