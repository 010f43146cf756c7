"""Calls of public functions that ended in another library's error, or went on as if nothing were wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plain_net import two_linears

from pipeloom import (
    Job,
    Options,
    Pipeline,
    PipeloomError,
    Plan,
    capture,
    load_plan,
    plan,
    profile,
    search_schedule,
)
from pipeloom.ir.errors import BatchError, CaptureError, ConfigError

ROWS = 4


def test_paths_may_be_text(tmp_path: Path) -> None:
    """They gave AttributeError: 'str' object has no attribute ..."""
    job, path, kept = two_linears(), f"{tmp_path}/plan.json", f"{tmp_path}/checkpoints"
    made = plan_of(job)
    made.save(path)
    assert load_plan(path) == made
    with Pipeline(job, path) as pipeline:
        pipeline.step(job.batch(0, 2 * ROWS))
        pipeline.save(kept, extra={"at": 1})
        assert pipeline.load(kept) == {"at": 1}


def plan_of(job: Job) -> Plan:
    return plan(job, ranks=1, microbatches=2, microbatch_size=ROWS, cluster="1 x cpu")


def pipeline_of(job: Job, device: str = "cpu") -> Pipeline:
    return Pipeline(job, plan_of(job), options=Options(device=device))


def test_no_checkpoint_to_keep(tmp_path: Path) -> None:
    with (
        pipeline_of(two_linears()) as pipeline,
        pytest.raises(ConfigError, match="keep=0 keeps no checkpoint"),
    ):
        pipeline.save(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())


def test_a_batch_without_tensors() -> None:
    with pipeline_of(two_linears()) as pipeline, pytest.raises(BatchError, match="the batch has no tensors"):
        pipeline.step({})


STAGES = {"stage": [{"F": 1, "B": 2, "ranks": rank} for rank in range(2)]}
HOW = {"ranks": 2, "microbatch_size": ROWS, "cluster": "2 x cpu", "schedule": "interleaved"}


@pytest.mark.parametrize(
    ("slip", "error", "said"),
    [
        (lambda: capture(two_linears(), 0), CaptureError, "microbatch_size is 0"),
        (lambda: plan(two_linears(), chunks=0, **HOW), ConfigError, "chunks is 0"),
        (lambda: search_schedule(STAGES, 4, shortest="day"), ConfigError, "shortest='day'"),
        (lambda: profile(capture(two_linears(), 2), device="tpu"), ConfigError, "'tpu' is no device"),
        (lambda: profile(capture(two_linears(), 2), device=None), ConfigError, "None is no device"),
        (
            lambda: profile(capture(two_linears(), 2), device="cuda:99"),
            ConfigError,
            "'cuda:99' was asked",
        ),
        (lambda: pipeline_of(two_linears(), "xpu"), ConfigError, "'xpu' is no device"),
        (lambda: pipeline_of(two_linears(), "cuda:99"), ConfigError, "'cuda:99' was asked"),
    ],
)
def test_slips_are_named(slip: Callable[[], object], error: type[PipeloomError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        slip()
    assert caught.value.hint
