"""Which tier a rank has: one entry per type of device, each tier in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..ir.plan import Plan
from .file_tier import open_file_tier
from .pinned_tier import PinnedTier
from .tier import Tier, TierOptions

TIERS: dict[str, Callable[[TierOptions], Tier]] = {
    "cpu": open_file_tier,
}
"""Type of device, as torch names it -> what opens a rank's tier; of all others it is in pinned memory."""


def _pinned_tier(options: TierOptions) -> Tier:
    return PinnedTier(options.rank)


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
    folder = None if directory is None else Path(directory)
    return TIERS.get(device.type, _pinned_tier)(TierOptions(rank=rank, directory=folder, first=first))
