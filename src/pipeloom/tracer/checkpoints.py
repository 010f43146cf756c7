"""Activation checkpoints around what keeps running statistics: PyTorch runs such code twice, and updates the
statistics twice. A captured model runs it once, so its buffers would be others: it is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from inspect import signature
from threading import local
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.utils import checkpoint

from ..ir.errors import CaptureError
from .user_code import at, user_line

_here = local()


@contextmanager
def inside_checkpoint() -> Iterator[None]:
    """The block is run again in the backward."""
    before = getattr(_here, "inside", False)
    _here.inside = True
    try:
        yield
    finally:
        _here.inside = before


@contextmanager
def statistics_in_checkpoints_refused(name: str) -> Iterator[None]:
    """Raise CaptureError where a forward updates running statistics inside a checkpoint.

    Other threads must not run models meanwhile.
    """
    batch_norm: Callable[..., Tensor] = functional.batch_norm
    called = signature(batch_norm)
    generator = checkpoint._checkpoint_without_reentrant_generator

    def checked_batch_norm(*args: Any, **kwargs: Any) -> Tensor:
        given = called.bind(*args, **kwargs).arguments
        keeps = given.get("training") and given.get("running_mean") is not None
        if keeps and getattr(_here, "inside", False):
            raise CaptureError(
                f"the forward of {name} updates running statistics inside a checkpoint{at(user_line())}: "
                "PyTorch updates them twice, the second time when it computes again, and a pipeline once",
                hint="switch the model's checkpointing off, and let pipeloom do it: --treatments recompute",
            )
        return batch_norm(*args, **kwargs)

    def watched_generator(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        with inside_checkpoint():
            yield from generator(*args, **kwargs)

    functional.batch_norm = checked_batch_norm
    checkpoint._checkpoint_without_reentrant_generator = watched_generator
    try:
        yield
    finally:
        functional.batch_norm = batch_norm
        checkpoint._checkpoint_without_reentrant_generator = generator
