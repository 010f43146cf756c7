"""Tracing and seeding use global state of PyTorch: ranks that are threads of one process take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

TRACING_LOCK = threading.RLock()


def one_thread_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Let only one thread at a time run any of the functions so marked."""

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with TRACING_LOCK:
            return function(*args, **kwargs)

    return locked
