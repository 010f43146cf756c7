"""What copies take: their sizes and times, and the uplinks to the host that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir.costs import StageCost

USUAL_K = 0.75


@dataclass(frozen=True, kw_only=True)
class Uplinks:
    """of_rank: the number of each rank's uplink.  seconds: per stage what a copy takes of it."""

    of_rank: tuple[int, ...]
    seconds: tuple[float, ...]

    def hold_up(self, costs: Sequence[StageCost]) -> bool:
        """Whether a copy may wait for more than the copies of its own rank."""
        return len(set(self.of_rank)) < len(self.of_rank) or any(
            not cost.offload_s == cost.reload_s == seconds
            for cost, seconds in zip(costs, self.seconds, strict=True)
        )


def shared_uplinks(costs: Sequence[StageCost], ranks: int, each: int = 1) -> Uplinks:
    """An uplink for every `each` neighbouring ranks, as fast as the link of each of them."""
    return Uplinks(
        of_rank=tuple(rank // each for rank in range(ranks)),
        seconds=tuple(max(cost.offload_s, cost.reload_s) for cost in costs),
    )


def with_copies(costs: Sequence[StageCost], k: float) -> tuple[StageCost, ...]:
    """Stages of which all residuals may be copied, where OFFLOAD and RELOAD together take k times as long as
    F, I and W on average over the stages. Sizes that are not known are 1.

    k: 2 * bytes / (bandwidth * seconds of computing), see section 1 of PipeOffload (arXiv 2503.01328).

    >>> from pipeloom.ir.costs import equal_costs
    >>> [cost.offload_s for cost in with_copies(equal_costs(2), 1.0)]
    [1.5, 1.5]
    """
    known = any(cost.residual_bytes for cost in costs)
    sizes = [cost.residual_bytes if known else 1 for cost in costs]
    compute_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    s_per_byte = k / 2 * compute_s / sum(sizes)
    return tuple(
        replace(
            cost,
            residual_bytes=size,
            carried_bytes=min(cost.carried_bytes, size) if known else size,
            offloaded_bytes=size,
            recomputed_bytes=0,
            offload_s=size * s_per_byte,
            reload_s=size * s_per_byte,
        )
        for cost, size in zip(costs, sizes, strict=True)
    )
