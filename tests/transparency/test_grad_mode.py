"""The caller's mode of autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from plain_net import two_linears

from pipeloom import Options, Pipeline, plan


def losses(mode: Callable[[], AbstractContextManager[object]], *, compare: bool) -> list[float]:
    job = two_linears()
    made = plan(job, ranks=1, microbatches=2, microbatch_size=2, cluster="1 x cpu")
    with mode(), Pipeline(job, made, options=Options(compare=compare)) as pipeline:
        return [pipeline.step(job.batch(0, 4)) for _ in range(3)] + [pipeline.evaluate(job.batch(0, 4))]


@pytest.mark.own_captures
@pytest.mark.parametrize("compare", [False, True])
def test_a_pipeline_in_no_grad_trains_as_outside(
    compare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # compared anew
    assert losses(torch.no_grad, compare=compare) == losses(nullcontext, compare=compare)
