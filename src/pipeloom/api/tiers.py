"""Where one rank puts the residuals that a plan offloads."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ..ir.plan import Plan
from ..runtime.cuda_tier import CudaTier
from ..runtime.file_tier import FileTier
from ..runtime.tiers import Tier


def own_tier(
    plan: Plan, own_stages: Sequence[int], device: torch.device, directory: Path | None, rank: int
) -> Tier | None:
    """None if no stage of this rank offloads anything. directory: for a CPU rank; None for the system's."""
    origins = {stage % len(plan.stages) for stage in own_stages}
    if not any(plan.memory.treated(stage, "offload") for stage in origins):
        return None
    if device.type == "cuda":
        return CudaTier(rank)
    return FileTier(directory or Path(tempfile.gettempdir()), rank)
