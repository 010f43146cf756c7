"""Which tier a rank has: one entry per type of device, each tier in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..ir.plan import Plan
from .file_tier import open_file_tier
from .pinned_tier import PinnedTier
from .tier import Tier

TIERS: dict[str, Callable[[int, Path | None, bool], Tier]] = {
    "cpu": open_file_tier,
}
"""Type of device, as torch names it -> what opens a tier for a rank: in files of a folder, None if the user
named none; and whether it is the first rank that offloads. Of all other types it is in pinned memory."""


def open_tier(
    plan: Plan, own_stages: Sequence[int], device: torch.device, directory: Path | str | None, rank: int
) -> Tier | None:
    """The tier to which one rank offloads residuals; None if no stage of it offloads anything.

    directory: for tiers of files; None for the system's folder for temporary ones.
    Raises: ConfigError if there is no room for the tier.
    """
    count = len(plan.stages)
    offloading = [s for s in range(len(plan.placement)) if plan.memory.treated(s % count, "offload")]
    if set(offloading).isdisjoint(own_stages):
        return None
    first = rank == min(plan.placement[stage] for stage in offloading)
    if device.type not in TIERS:
        return PinnedTier(rank)
    return TIERS[device.type](rank, None if directory is None else Path(directory), first)
