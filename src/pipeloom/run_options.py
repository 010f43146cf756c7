"""How a pipeline runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .ir.errors import ConfigError
from .plan_settings import LONGEST_WAIT_S, refuse_types
from .tracer.autocast import Autocast


def named_device(name: str) -> str:
    """The device that "auto" means here: PyTorch's accelerator if there is one, else "cpu". Another name is
    given back."""
    if name != "auto":
        return name
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def mixed_precision(dtype: torch.dtype | None, device: str) -> Autocast | None:
    """How a model is captured that trains with this `Options.autocast` on a device ("cuda:1").

    Raises: ConfigError for all dtypes but bfloat16, which would give wrong gradients.
    """
    if dtype not in (None, torch.bfloat16):
        raise ConfigError(
            f"autocast is {dtype!r}; mixed precision is bfloat16 only: nothing scales the loss for float16",
            hint="use torch.bfloat16, which has the range of float32, or None",
        )
    return None if dtype is None else Autocast(dtype, torch.device(device).type)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a pipeline runs.

    device: "cpu"; "cuda" for the GPU of this rank's number on its node (LOCAL_RANK); "cuda:1"; or
    "auto": PyTorch's accelerator if it has one here, else "cpu".
    seed: of the initial weights and of random ops.
    clip_norm: limit of the gradients' global norm (2-norm, over all ranks); None leaves them as they are.
    scheduler: optimizer -> LR scheduler, stepped once a step. If the job's optimizer only holds others, it is
    called for each of these.
    autocast: torch.bfloat16 for mixed precision, None for none.  compile: run stages through torch.compile.
    master_weights: keep parameters of lower precision in float32 as well: their gradients are summed, and the
    optimizer steps them, in float32. Needs weights that are updated with a flush.
    tf32: whether GPUs may multiply float32 matrices in TF32; None leaves PyTorch's setting as it is.
    timeout_s: limit of each wait; a rank that gives no sign of life for so long (60 s at most) has failed.
    keep_gradients: keep a copy of each step's gradients, before clipping, for inspection.
    offload_dir: where a CPU rank puts the residuals that the plan offloads; the system's temporary folder
    unless given. Their files have no names and vanish with the process.
    compare: before the first step of a model that was not trained here before, compare two micro-batches with
    plain PyTorch; see `verification.py`. Off by default where PIPELOOM_COMPARE is 0.

    Raises: ConfigError for an `autocast` that cannot be trained with, or a number that cannot be.

    >>> options = Options(device="cpu", clip_norm=1.0, autocast=torch.bfloat16)
    >>> options.device, options.timeout_s
    ('cpu', 300.0)
    """

    device: str = "auto"
    seed: int = 0
    clip_norm: float | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    autocast: torch.dtype | None = None
    compile: bool = False
    master_weights: bool = False
    tf32: bool | None = None
    timeout_s: float = 300.0
    keep_gradients: bool = False
    offload_dir: Path | str | None = None
    compare: bool = field(default_factory=lambda: os.environ.get("PIPELOOM_COMPARE") != "0")

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", named_device(str(self.device)))  # a torch.device is taken, too
        mixed_precision(self.autocast, self.device)
        refuse_types(self, Options)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm is {self.clip_norm}", hint="use more than 0, or None not to clip")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}", hint="use a number of 64 bits")
        if not 0 < self.timeout_s <= LONGEST_WAIT_S:
            raise ConfigError(
                f"timeout_s is {self.timeout_s}",
                hint=f"use a number of seconds above 0, at most {LONGEST_WAIT_S:.0f}",
            )
