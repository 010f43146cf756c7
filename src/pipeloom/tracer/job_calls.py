"""What pipeloom calls of a job: its batches, and its model, together with its loss or in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ir.errors import CaptureError
from .job import Job
from .random import one_thread_at_a_time


@one_thread_at_a_time
def sample_batch(job: Job, seed: int, rows: int) -> dict[str, Tensor]:
    """`job.batch(seed, rows)`, with the default generators left as they were.

    A job may seed them to make its batch; a rank that is a thread must not do so while another initialises
    its weights.
    """
    with torch.random.fork_rng(devices=[]):
        return job.batch(seed, rows)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()`; afterwards each module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class ModelWithLoss(nn.Module):
    """Model and loss as one module, so that both are in the graph."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__()
        self.model = model
        self.job = job

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return scalar_loss(self.job, self.model(**batch), batch)


def scalar_loss(job: Job, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a model's outputs: by the job's `loss`, or the outputs' own.

    Raises: CaptureError if there is none, or it is not a scalar.
    """
    if job.loss is not None:
        loss: Any = job.loss(outputs, batch)
    else:
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if loss is None and isinstance(outputs, Tensor) and outputs.ndim == 0:
            loss = outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError(
            f"the loss of {job.name} must be a scalar tensor, got {got}",
            hint="return outputs with a `.loss`, or give Job(loss=...) a function that returns a scalar",
        )
    return loss.reshape(())
