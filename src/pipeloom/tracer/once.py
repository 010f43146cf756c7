"""Tracing and seeding use global state of PyTorch: ranks that are threads of one process take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

TURN = threading.RLock()


def one_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Let only one thread at a time run any of the functions so marked."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with TURN:
            return function(*args, **kwargs)

    return alone
