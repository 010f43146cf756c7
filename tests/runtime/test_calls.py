"""How many calls of pipeloom's functions a step takes: on a GPU, time in which nothing new is launched."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import pipeloom

MOST_CALLS = 350
PACKAGE = str(Path(pipeloom.__file__).parent)


def test_a_step_of_one_stage() -> None:
    job = pipeloom.Job(
        model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
        batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
        loss=lambda output, batch: output.square().mean(),
    )
    plan = pipeloom.plan(job, ranks=1, microbatches=2, microbatch_size=4, cluster="a100-40")
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[f"{frame.f_code.co_filename.removeprefix(PACKAGE)}: {frame.f_code.co_qualname}"] += 1

    with pipeloom.Pipeline(job, plan) as pipeline:
        batch = job.batch(1, 8)
        for _ in range(2):  # functions measure their first run, optimizers make their state
            pipeline.step(batch)
        sys.setprofile(count)
        try:
            pipeline.step(batch)
        finally:
            sys.setprofile(None)
    assert 0 < calls.total() <= MOST_CALLS, calls.most_common(30)
