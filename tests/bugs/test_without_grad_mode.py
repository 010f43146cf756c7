"""Stages that were traced where the caller had switched gradients off had no backward: nothing was learnt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from pipeloom import Job, Options, Pipeline, plan


def small_job() -> Job:
    return Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * (seed + 1))},
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def losses(mode: Callable[[], AbstractContextManager[object]], *, compare: bool) -> list[float]:
    job = small_job()
    made = plan(job, stages=1, microbatches=2, microbatch_size=2, cluster="1 x cpu")
    with mode(), Pipeline(job, made, options=Options(compare=compare)) as pipeline:
        return [pipeline.step(job.batch(0, 4)) for _ in range(3)] + [pipeline.evaluate(job.batch(0, 4))]


@pytest.mark.own_captures
@pytest.mark.parametrize("compare", [False, True])
def test_a_pipeline_in_no_grad_trains_as_outside(
    compare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # compared anew
    assert losses(torch.no_grad, compare=compare) == losses(nullcontext, compare=compare)
