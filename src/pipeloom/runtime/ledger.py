"""Ledger: what a rank holds in its device's memory, by kind, now and at the peak.

Counted: parameters, gradients, optimizer state, buffers, the batch, residuals, boundary messages, and the
scratch of the action that runs (transient). Not counted: the interpreter, libraries, and the workspace
that a single kernel allocates and frees inside itself. What is offloaded is counted apart, as host memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch

from ..ir.costs import MEMORY_KINDS
from ..ir.errors import MemoryCapError
from ..ir.stages import StageGraph
from ..ir.text import format_bytes


class Ledger:
    """Bytes alive on one rank.

    cap_bytes: a limit that ends the run when it is passed; None for no limit.
    residual_peak: the most bytes of residuals at any time, apart from the peak of all together.
    host, host_peak: bytes of offloaded residuals in host memory or files, now and at most.
    """

    def __init__(self, rank: int, cap_bytes: int | None = None) -> None:
        self.rank = rank
        self.cap_bytes = cap_bytes
        self.levels: dict[str, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = dict(self.levels)
        self.residual_peak = self.host = self.host_peak = 0

    def set(self, kind: str, size: int, doing: str = "") -> None:
        """Raises: MemoryCapError if that passes the cap; so do `add` and `during`."""
        self.add(kind, size - self.levels[kind], doing)

    def add(self, kind: str, change: int, doing: str = "") -> None:
        self.levels[kind] += change
        self.total += change
        if kind == "residuals":
            self.residual_peak = max(self.residual_peak, self.levels[kind])
        if self.total > self.peak:
            self._new_peak(self.total, self.levels, doing)

    def during(self, doing: str, size: int, outliving: Mapping[str, int]) -> None:
        """While `doing` ran, `size` bytes were alive on top of the rest.

        outliving: kind -> bytes among them that outlive it, and that are entered once it is over.

        >>> ledger = Ledger(0)
        >>> ledger.during("0F0", 100, {"residuals": 60})
        >>> ledger.at_peak["residuals"], ledger.at_peak["transient"], ledger.total
        (60, 40, 0)
        """
        left = sum(outliving.values())
        peak = self.total + max(size, left)
        self.residual_peak = max(self.residual_peak, self.levels["residuals"] + outliving.get("residuals", 0))
        if peak > self.peak:
            levels = {kind: level + outliving.get(kind, 0) for kind, level in self.levels.items()}
            levels["transient"] += max(0, size - left)
            self._new_peak(peak, levels, doing)

    def refuse(self, size: int, doing: str) -> NoReturn:
        assert self.cap_bytes is not None, "only a cap can be passed"
        raise MemoryCapError(
            f"rank {self.rank} needs {format_bytes(size)} for {doing} and holds {format_bytes(self.total)}, "
            f"its cap is {format_bytes(self.cap_bytes)}, and no message under way would make room\n"
            f"{table(self.levels)}",
            hint=_SMALLER,
        )

    def _new_peak(self, total: int, levels: Mapping[str, int], doing: str) -> None:
        self.peak = total
        self.at_peak = dict(levels)
        if self.cap_bytes is not None and total > self.cap_bytes:
            raise MemoryCapError(
                f"rank {self.rank} holds {format_bytes(total)} at {doing or 'start-up'}, its cap is "
                f"{format_bytes(self.cap_bytes)}, {format_bytes(total - self.cap_bytes)} less\n"
                f"{table(levels)}",
                hint=_SMALLER,
            )


_SMALLER = "use smaller micro-batches, more stages or a higher cap"


def crossing_bytes(stages: StageGraph, index: int) -> tuple[int, int]:
    """Bytes of what a stage makes for other stages: of the values for its readers, of the gradients that it
    gives back. Each reader's copy counts."""
    values = sum(v.bytes for target in stages.successors[index] for v in stages.between[index, target])
    grads = sum(v.bytes for source in stages.predecessors[index] for v in stages.gradients(source, index))
    return values, grads


def table(levels: Mapping[str, int]) -> str:
    """Kinds and sizes, largest first, one per line.

    >>> print(table({"residuals": 3 * 1024**2, "parameters": 1024**2, "batch": 0}))
      residuals   3.0 MiB
      parameters  1.0 MiB
    """
    rows = sorted(((size, kind) for kind, size in levels.items() if size), reverse=True)
    return "\n".join(f"  {kind:<11} {format_bytes(size)}" for size, kind in rows)


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
    if not torch.accelerator.is_available():
        return ""
    held, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    return f"; PyTorch holds {format_bytes(held)} there and has reserved {format_bytes(reserved)}"
