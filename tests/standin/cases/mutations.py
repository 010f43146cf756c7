"""Waits and lifetimes that are taken out of the runtime, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import standin
import torch

from pipeloom.runtime import cuda_tier, nccl
from pipeloom.runtime.cuda_tier import CudaCopy, CudaTier


def without_waits(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, in which no stream waits."""

    def mutated(*args: Any, **how: Any) -> Any:
        with standin.deaf():
            return method(*args, **how)

    return mutated


def leaves_at_once(method: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(self: CudaTier, action: str, residuals: Any) -> CudaCopy:
        copy = method(self, action, residuals)
        copy.leaving.clear()
        return copy

    return mutated


MUTATIONS: dict[str, tuple[object, str, Callable[[Any], Any], str]] = {
    "the copy away does not wait for the computation": (
        CudaTier, "offload", without_waits, "race: copy_ .* reads"),
    "the copy back does not wait for the computation": (
        CudaTier, "copy_back", without_waits, "race: copy_ .* writes"),
    "the computation does not wait for the copy back": (
        CudaCopy, "take", without_waits, "race: .* copy_ .* writes"),
    "what leaves is freed before it is copied": (
        CudaTier, "offload", leaves_at_once, "early free: .* while copy_"),
    "what leaves is freed without a wait": (
        CudaCopy, "leave", without_waits, "early free: .* while copy_"),
    "copies run where the computation runs": (
        cuda_tier, "_stream", lambda m: torch.accelerator.current_stream, ""),
    "a transfer is not waited for": (
        nccl._Enqueued, "wait", lambda m: lambda self, timeout_s: None, "race: .* (recv|send) "),
}  # fmt: skip
"""What -> where it is, which name, what replaces it, and what the stand-in has to say ("": all is well)."""


@contextmanager
def applied(name: str) -> Iterator[None]:
    if name == "none":
        yield
        return
    where, method, change, _ = MUTATIONS[name]
    never_sooner = patch.object(
        cuda_tier, "_reached", lambda event: False
    )  # whoever sees a copy end needs no wait
    with never_sooner, patch.object(where, method, change(getattr(where, method))):
        yield
