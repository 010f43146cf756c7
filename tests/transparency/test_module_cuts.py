"""Models that torch.export cannot capture: the same numbers as one process, for cuts between modules."""

from collections.abc import Callable, Sequence
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


def check(job: Job, stages: int, *, split: bool = False, sizes: Sequence[int] = (8, 8, 8)) -> None:
    """Two steps and an evaluation agree with plain PyTorch."""
    batches = [job.batch(seed, size) for seed, size in enumerate(sizes)]
    plan = even_plan(job, stages, microbatches=4, split=split)
    found = pipelined(job, plan, batches[:2], evaluate=batches[2:])
    assert_same(found, plain(job, batches[:2], 4, evaluate=batches[2:]), tolerance=2e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["branch between blocks", "loops by item", "batch norm"])
def test_batches_of_other_sizes(name: str) -> None:
    """The plan was made for micro-batches of 2; here they have 1, 2 and 3 rows."""
    check(JOBS[name], 3, sizes=(7, 12, 5))


def test_reentrant_checkpoints_cannot_be_split() -> None:
    with pytest.raises(CutError, match="reentrant"):
        check(job(CheckpointedOldWay), 3, split=True)


@pytest.mark.parametrize(
    ("name", "stages", "how", "expected", "tolerance"),
    [
        ("branch between blocks", 3, {"autocast": torch.bfloat16}, {"autocast": torch.bfloat16}, 1e-2),
        pytest.param("experts", 2, {"compile": True}, {}, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_mixed_precision_and_compiled_modules(name, stages, how, expected, tolerance) -> None:
    job = replace(JOBS[name], name=f"{name} otherwise")
    batches = [job.batch(seed, 8) for seed in range(2)]
    found = pipelined(job, even_plan(job, stages, microbatches=4), batches, **how)
    assert_same(found, plain(job, batches, 4, **expected), tolerance=tolerance)


def test_code_that_ties_modules_together_leaves_other_cuts() -> None:
    def ops(model: Callable[[], nn.Module]) -> list[str]:
        return [op.name for op in capture_of(job(model)).graph.ops]

    assert ops(ThroughViews) == ["inlet", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert ops(LeftInAList) == ["inlet", "blocks.0...blocks.1", "blocks.2", "head"]
    assert ops(RoutesBetween) == ["first", "router...head"]
    assert ops(NoModules) == ["model"]


@pytest.mark.sampled("skips-2")
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", nets.NAMES)
def test_models_that_export_can_capture(name: str, stages: int) -> None:
    """Cutting between modules does not depend on why export failed: any model can be cut so."""
    job = replace(nets.job(name), name=f"{name} by modules")
    with patch("pipeloom.tracer.capture.export_watched", side_effect=CaptureError("not asked")):
        ops = len(capture_of(job).graph.ops)
        check(job, min(stages, ops), split=True)
