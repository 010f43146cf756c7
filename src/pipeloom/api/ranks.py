"""Starting the ranks of a run, and what they tell each other before one of them trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..ir.errors import PipeloomError
from ..runtime import connect, launch

__all__ = ["connect", "launch", "result_of_rank_0"]

T = TypeVar("T")


def result_of_rank_0(group: dist.ProcessGroup, make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; its error too, since the others must not wait for a
    result. Every rank calls it."""
    message: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            message[0] = make()
        except PipeloomError as error:
            message[1] = error
    dist.broadcast_object_list(message, src=0, group=group)
    value, problem = message
    if problem is not None:
        raise problem
    result: T = value
    return result
