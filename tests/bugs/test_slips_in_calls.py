"""Calls of public functions that ended in another library's error, or went on as if nothing were wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeloom import Job, Options, Pipeline, PipeloomError, capture, load_plan, plan, profile, search_schedule
from pipeloom.ir.errors import BatchError, CaptureError, ConfigError, ScheduleError

ROWS = 4


def small_job() -> Job:
    return Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * (seed + 1))},
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def test_paths_may_be_text(tmp_path: Path) -> None:
    """They gave AttributeError: 'str' object has no attribute ..."""
    job, path, kept = small_job(), f"{tmp_path}/plan.json", f"{tmp_path}/checkpoints"
    made = plan(job, stages=1, microbatches=2, microbatch_size=ROWS, cluster="1 x cpu")
    made.save(path)
    assert load_plan(path) == made
    with Pipeline(job, path) as pipeline:
        pipeline.step(job.batch(0, 2 * ROWS))
        pipeline.save(kept, extra={"at": 1})
        assert pipeline.load(kept) == {"at": 1}


def step_of_nothing() -> None:
    job = small_job()
    with Pipeline(
        job, plan(job, stages=1, microbatches=2, microbatch_size=ROWS, cluster="1 x cpu")
    ) as pipeline:
        pipeline.step({})


def keep_no_checkpoint() -> None:
    job = small_job()
    with Pipeline(
        job, plan(job, stages=1, microbatches=2, microbatch_size=ROWS, cluster="1 x cpu")
    ) as pipeline:
        pipeline.save("nowhere", keep=0)


def train_on(device: str) -> None:
    job = small_job()
    made = plan(job, stages=1, microbatches=2, microbatch_size=ROWS, cluster="1 x cpu")
    Pipeline(job, made, options=Options(device=device))


STAGES = {"stage": [{"F": 1, "B": 2, "ranks": rank} for rank in range(2)]}
HOW = {"stages": 2, "microbatch_size": ROWS, "cluster": "2 x cpu", "schedule": "interleaved"}


@pytest.mark.parametrize(
    ("slip", "error", "said"),
    [
        (step_of_nothing, BatchError, "the batch has no tensors"),
        (keep_no_checkpoint, ConfigError, "0 are to be kept"),
        (lambda: capture(small_job(), 0), CaptureError, "0 rows"),
        (lambda: plan(small_job(), chunks=0, **HOW), ScheduleError, "0 stages per rank"),
        (lambda: search_schedule(STAGES, 4, shortest="day"), ConfigError, "shortest='day'"),
        (lambda: profile(capture(small_job(), 2), device="tpu"), ConfigError, "'tpu' is no device"),
        (lambda: profile(capture(small_job(), 2), device="cuda:99"), ConfigError, "'cuda:99' was asked for"),
        (lambda: train_on("xpu"), ConfigError, "'xpu' is no device"),
        (lambda: train_on("cuda:99"), ConfigError, "'cuda:99' was asked for"),
    ],
)
def test_slips_are_named(slip: Callable[[], object], error: type[PipeloomError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        slip()
    assert caught.value.hint
