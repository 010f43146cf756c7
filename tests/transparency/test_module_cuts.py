"""Models that torch.export cannot capture: the same numbers as one process, for cuts between modules."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import nets
import pytest
import torch
from odd.case import job
from odd.control_flow import JOBS, LeftInAList, NoModules, RoutesBetween, ThroughViews
from odd.gradients import CheckpointedOldWay
from runs import assert_same, capture_of, even_plan, pipelined, plain
from torch import nn

from pipeloom import Job
from pipeloom.ir.errors import CaptureError, CutError

TOLERANCE = 2e-5


def check(
    job: Job, stages: int, schedule: str = "1f1b", *, split: bool = False, sizes: tuple[int, ...] = ()
) -> None:
    """Two steps and an evaluation agree with plain PyTorch."""
    batches = [job.batch(seed, size) for seed, size in enumerate(sizes or (8, 8, 8))]
    plan = even_plan(job, stages, microbatches=4, schedule=schedule, split=split)
    found = pipelined(job, plan, batches[:2], evaluate=batches[2:])
    assert_same(found, plain(job, batches[:2], 4, evaluate=batches[2:]), tolerance=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["branch between blocks", "loops by item", "batch norm"])
def test_batches_of_other_sizes(name: str) -> None:
    """The plan was made for micro-batches of 2; here they have 1, 2 and 3 rows."""
    check(JOBS[name], 3, sizes=(7, 12, 5))


def test_code_that_ties_modules_together_leaves_other_cuts() -> None:
    def ops(model: Callable[[], nn.Module]) -> list[str]:
        return [op.name for op in capture_of(job(model)).graph.ops]

    assert ops(ThroughViews) == ["inlet", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert ops(LeftInAList) == ["inlet", "blocks.0...blocks.1", "blocks.2", "head"]
    assert ops(RoutesBetween) == ["first", "router...head"]
    assert ops(NoModules) == ["model"]


def test_reentrant_checkpoints_cannot_be_split() -> None:
    with pytest.raises(CutError, match="reentrant"):
        check(job(CheckpointedOldWay), 3, "1f1b", split=True)


def test_mixed_precision() -> None:
    job = JOBS["branch between blocks"]
    batches = [job.batch(seed, 8) for seed in range(2)]
    found = pipelined(job, even_plan(job, 3, microbatches=4), batches, autocast=torch.bfloat16)
    assert_same(found, plain(job, batches, 4, autocast=torch.bfloat16), tolerance=1e-2)


@pytest.mark.slow
def test_compiled_modules() -> None:
    job = replace(JOBS["experts"], name="compiled experts")
    batches = [job.batch(seed, 8) for seed in range(2)]
    found = pipelined(job, even_plan(job, 2, microbatches=4), batches, compile=True)
    assert_same(found, plain(job, batches, 4), tolerance=1e-4)


@pytest.mark.sampled("skips-2")
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", nets.NAMES)
def test_models_that_export_can_capture(name: str, stages: int) -> None:
    """Cutting between modules does not depend on why export failed: any model can be cut so."""
    job = replace(nets.job(name), name=f"{name} by modules")
    with patch("pipeloom.tracer.capture.export_watched", side_effect=CaptureError("not asked")):
        ops = len(capture_of(job).graph.ops)
        check(job, min(stages, ops), "1f1b", split=True)
