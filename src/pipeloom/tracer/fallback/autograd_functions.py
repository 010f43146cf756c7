"""Calls of the user's `torch.autograd.Function`s, which torch function modes do not see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

Seen = Callable[[Any, str, tuple[Any, ...]], Any]
"""(apply of a class, name, arguments) -> result"""

_ORIGINAL: Any = vars(torch.autograd.Function)["apply"]
_lock = threading.Lock()
_watching = 0
_here = threading.local()


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    run = _ORIGINAL.__get__(None, cls)
    seen: Seen | None = getattr(_here, "seen", None)
    if seen is None:
        return run(*args, **kwargs)
    return seen(run, f"{cls.__name__}.apply", args)


@contextmanager
def autograd_functions_seen_by(seen: Seen | None) -> Iterator[None]:
    """In this thread, `Function.apply` calls `seen` in the block, or itself again if that is None."""
    global _watching
    before = getattr(_here, "seen", None)
    with _lock:
        _watching += 1
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]
    _here.seen = seen
    try:
        yield
    finally:
        _here.seen = before
        with _lock:
            _watching -= 1
            if not _watching:
                torch.autograd.Function.apply = _ORIGINAL  # type: ignore[method-assign]


def is_checkpoint(name: str) -> bool:
    """Whether this is reentrant activation checkpointing, which calls units inside."""
    return name == f"{CheckpointFunction.__name__}.apply"
