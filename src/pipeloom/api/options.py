"""How a pipeline runs."""

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
    timeout_s: limit of each wait; a rank that gives no sign of life for so long (60 s at most) has failed.
    keep_gradients: keep a copy of each step's gradients for inspection.
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
