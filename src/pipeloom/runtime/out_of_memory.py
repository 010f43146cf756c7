"""What a rank says when its device has no more memory: who, where, and what it holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..ir.errors import MemoryCapError
from ..ir.text import format_bytes
from .ledger import Ledger, table


@contextmanager
def out_of_memory_told(ledger: Ledger, doing: Callable[[], str]) -> Iterator[None]:
    """PyTorch's error for a device without memory becomes one for users, with what the ledger counts.

    doing: what the rank does, such as "1F2".
    Raises: MemoryCapError in its place.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        wanted = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        raise MemoryCapError(
            f"rank {ledger.rank} is out of its device's memory at {doing()}: "
            f"{wanted[1] if wanted else 'more'} could not be allocated{_of_device()}. "
            f"Before that its ledger counts {format_bytes(ledger.total)}\n"
            f"{table(ledger.levels)}".rstrip(),
            hint="use smaller micro-batches or more stages, or plan with a cap (--memory), so that "
            "residuals are recomputed or offloaded",
        ) from None


def _of_device() -> str:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return f"; PyTorch holds {format_bytes(held)} there and has reserved {format_bytes(reserved)}"
