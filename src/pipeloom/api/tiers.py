"""Where one rank puts the residuals that a plan offloads."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ..ir.plan import Plan
from ..runtime import CudaTier, FileTier, Tier, lies_in_memory


def own_tier(
    plan: Plan, own_stages: Sequence[int], device: torch.device, directory: Path | str | None, rank: int
) -> Tier | None:
    """None if no stage of this rank offloads anything. directory: for a CPU rank; None for the system's.

    Warns, once per run, where files in that directory would take memory instead of freeing it.
    """
    count = len(plan.stages)
    away = [s for s in range(len(plan.placement)) if plan.memory.treated(s % count, "offload")]
    if set(away).isdisjoint(own_stages):
        return None
    if device.type == "cuda":
        return CudaTier(rank)
    folder = Path(directory or tempfile.gettempdir())
    if rank == min(plan.placement[stage] for stage in away) and lies_in_memory(folder):
        warnings.warn(
            f"offloaded residuals go to {folder}, which lies in memory (tmpfs): offloading frees none there; "
            "name a folder on a disk with --offload-dir (Options.offload_dir)",
            stacklevel=4,  # whoever made the pipeline
        )
    return FileTier(folder, rank)
