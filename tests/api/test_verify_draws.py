"""Models that draw random numbers are compared with plain PyTorch."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from odd.case import job
from odd.decisions import LeavesOut
from plain_net import PlainNet, job_of
from runs import even_plan
from torch import Tensor, nn

from pipeloom import Options, capture, verification, verify


def test_layers_that_are_left_out_are_compared() -> None:
    """LayerDrop draws single numbers (`torch.rand([])`): comparing them with one process ended in a
    traceback."""
    made = job(LeavesOut)
    verify(made, even_plan(made, 2, microbatches=2)).require()


class Dropping(PlainNet):
    def run(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(super().run(h), 0.5)


@pytest.mark.own_captures
def test_smaller_micro_batches_with_dropout_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model with dropout that was to be compared in smaller micro-batches was never compared, in each
    run anew: the smaller size was captured while random numbers were being recorded, which torch.export
    refuses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = job_of(Dropping)
    plan = even_plan(job, 2, microbatches=4)
    captured = capture(job, plan.microbatch_size)
    with caplog.at_level(logging.WARNING):
        found = verification.compare_first(job, plan, captured, Options(), rows=1)
    assert found.passed and found.independent and found.reference.endswith("with the same random numbers")
    assert not [record for record in caplog.records if record.name == "pipeloom"]
