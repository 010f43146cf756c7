"""What to say when no cut fits: the stage that binds, and the least that would do.

With memory optimisation the least is what remains when everything is freed that may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

import numpy as np

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError
from ..ir.units import enough_bytes, format_bytes
from .search import Search
from .strategies import filled


class NoCutFits(InfeasibleError):
    """No cut fits by estimate. share: of all caps, with which one does.  stages: how many would do."""

    def __init__(
        self, message: str, *, hint: str | None = None, share: float = 0.0, stages: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.share, self.stages = share, stages


MANY = 16
MORE_STAGES = 4
"""Up to so many times the stages are tried when the smallest number that fits is sought."""

ROUGHLY = 0.01
"""Relative error of the smallest cap where memory is optimised."""


def explain_infeasible(
    search: Search,
    more: Callable[[int], Search | None],
    largest: Callable[[], int | None] | None = None,
    *,
    advice: str = "",
) -> InfeasibleError:
    """The error for a search that found nothing.

    more: number of stages -> the search with so many, on devices like these; None if they differ.
    largest: the largest micro-batch size with a plan, 0 if none has one, None if unknown.
    advice: what else would help.
    """
    share, cuts = least_share(search)
    stage, need = binding_stage(scaled(search, share), cuts)
    exactly = "at least" if not (search.large or search.optimises) else "about"
    caps = sorted({ceil(cap * share) for cap in search.caps})
    least = " to ".join(enough_bytes(cap) for cap in (caps if len(caps) < 2 else (caps[0], caps[-1])))
    hints = [f"give {'each device' if len(caps) == 1 else 'devices'} {exactly} {least}"]
    stages = fewest_stages(search, more)
    if stages:
        hints.append(f"use {stages} stages")
    hints += [advice] if advice else []
    hints += _smaller(largest)
    freed = ", even with all freed that may be" if search.optimises else ""
    return NoCutFits(
        f"no cut of {len(search.model)} ops into {len(search.caps)} stages fits{freed}: in the one that "
        f"needs least, stage {stage} needs {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}{_closely(need, search.caps[stage])}",
        hint=", or ".join(hints),
        share=share,
        stages=stages,
    )


def passes_caps(
    over: Sequence[int], cluster: Cluster, schedule: str, largest: Callable[[], int | None] | None = None
) -> InfeasibleError:
    """The error where stages fit by the search's estimate, and no cut does once all its stages are known.

    over: bytes by which each rank passes its cap in the cut that comes closest.
    """
    rank = max(range(len(over)), key=over.__getitem__)
    cap = cluster.devices[rank].memory_bytes
    return InfeasibleError(
        f"no cut found keeps its caps with {schedule}: in the closest, rank {rank} holds "
        f"{format_bytes(cap + over[rank])}, its device's cap is {format_bytes(cap)}",
        hint=", or ".join([f"give the devices {enough_bytes(over[rank])} more", *_smaller(largest)]),
    )


def _smaller(largest: Callable[[], int | None] | None) -> list[str]:
    """The advice to use smaller micro-batches; none where not even the smallest would do."""
    size = largest() if largest is not None else None
    if size == 0:
        return []
    rows = "1 row" if size == 1 else f"at most {size} rows"
    return [f"use micro-batches of {rows}" if size else "use smaller micro-batches"]


def _closely(need: int, cap: int) -> str:
    """The difference, where both are printed alike."""
    alike = format_bytes(need) == format_bytes(cap) and need > cap
    return f", {format_bytes(need - cap)} less" if alike else ""


def does_not_fit(search: Search, cuts: tuple[int, ...], name: str) -> InfeasibleError:
    """The error for a cut by a planner that does not look at memory."""
    stage, need = binding_stage(search, cuts)
    return InfeasibleError(
        f"planner {name} gives stage {stage} {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}",
        hint="use planner dawnpiper, which keeps to the cap and frees memory, or more stages",
    )


def needs(search: Search, cuts: tuple[int, ...]) -> list[int]:
    """Bytes of each stage of a cut, with residuals freed as the search's caps demand, if they may be."""
    if search.optimises:
        bounds = enumerate(pairwise(cuts))
        return [round(search.evaluate(start, end, stage).peak_bytes) for stage, (start, end) in bounds]
    found = []
    for stage, (start, end) in enumerate(pairwise(cuts)):
        footprint, _ = search.model.row(start, np.array([end]))
        found.append(int(search.model.memory(footprint, np.array([search.in_flight[stage]]))[0, 0]))
    return found


def binding_stage(search: Search, cuts: tuple[int, ...]) -> tuple[int, int]:
    """The stage that fills most of its cap, and its bytes."""
    sizes = needs(search, cuts)
    return max(enumerate(sizes), key=lambda pair: pair[1] / search.caps[pair[0]])


def least_share(search: Search) -> tuple[float, tuple[int, ...]]:
    """The share of the caps with which some cut fits, and that cut.

    Above 1 where nothing fits. Where memory is optimised it is found by bisection, filling stage after stage
    under smaller and smaller caps, starting from what is needed with every residual kept.
    """
    high, cuts = search.smallest()
    if not search.optimises:
        return high, cuts
    low = 0.0
    while high - low > ROUGHLY * high:
        middle = (low + high) / 2
        smaller = scaled(search, middle)
        if found := filled(smaller.problem):
            high, cuts = middle, smaller.problem.positions(found)
        else:
            low = middle
    return high, cuts


def scaled(search: Search, share: float) -> Search:
    """The same under caps of this share of its own."""
    return replace(search, caps=tuple(max(1, ceil(cap * share)) for cap in search.caps))


def fewest_stages(search: Search, more: Callable[[int], Search | None]) -> int | None:
    """The smallest number of stages, above the search's, with which something fits; None if none does.

    By bisection: more stages on more devices like these need less each. None too where looking would take
    long, for large graphs on many devices.
    """
    if search.large and len(search.caps) > MANY:
        return None
    low, high = len(search.caps), min(MORE_STAGES * len(search.caps), len(search.model.cut_points) - 1)
    widest = more(high) if high > low else None
    if widest is None or not fits(widest):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        wider = more(middle)
        assert wider is not None  # the devices are alike, as the widest search showed
        low, high = (low, middle) if fits(wider) else (middle, high)
    return high


def fits(search: Search) -> bool:
    """Whether some cut fits; where memory is optimised, as far as filling stage after stage shows."""
    return bool(filled(search.problem)) if search.optimises else search.smallest()[0] <= 1
