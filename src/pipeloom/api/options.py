"""How a pipeline runs, and what it says of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a pipeline runs.

    device: "cpu", or "cuda" for this rank's GPU.  seed: of the initial weights and of random ops.
    clip_norm: limit of the gradients' global norm.  scheduler: optimizer -> LR scheduler, stepped once a
    step.  autocast: dtype of mixed precision.  compiled: run stages through torch.compile.
    accumulate: rounds of the schedule per optimizer step; a batch is spread over all of them.
    timeout_s: limit of each wait.  keep_gradients: keep a copy of each step's gradients for inspection.
    offload_dir: where a CPU rank puts the residuals that the plan offloads; the system's temporary folder
    unless given. Their files have no names and vanish with the process.
    """

    device: str = "cpu"
    seed: int = 0
    clip_norm: float | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    autocast: torch.dtype | None = None
    compiled: bool = False
    accumulate: int = 1
    timeout_s: float = 300.0
    keep_gradients: bool = False
    offload_dir: Path | str | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step was like, the same on every rank.

    step_s: seconds from its first action to the end of its last, on the slowest rank.
    wall_s: per rank, seconds of the whole call but its last exchange.  busy_s: of computing.  waited_s: for
    messages and other ranks.  peak_bytes: largest memory so far.  grad_norm: before clipping, None without.
    """

    loss: float
    step_s: float
    wall_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    grad_norm: float | None = None

    @property
    def bubble(self) -> float:
        """Share of rank-time in which nothing was computed."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)

    @property
    def overhead(self) -> float:
        """Largest share of a rank's time that is neither computing nor waiting: pipeloom's own work."""
        parts = zip(self.wall_s, self.busy_s, self.waited_s, strict=True)
        return max((wall - busy - waited) / wall for wall, busy, waited in parts)
