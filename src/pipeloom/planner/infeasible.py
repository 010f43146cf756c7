"""What to say when no cut fits: the stage that binds, and the least that would do."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np

from ..ir.errors import InfeasibleError
from ..ir.units import format_bytes
from .search import Search

MANY = 16
MORE_STAGES = 4
"""Up to so many times the stages are tried when the smallest number that fits is sought."""


def explain_infeasible(search: Search, more: Callable[[int], Search | None]) -> InfeasibleError:
    """The error for a search that found nothing.

    more: number of stages -> the search with so many, on devices like these; None if they differ.
    """
    share, cuts = search.smallest()
    stage, need = binding_stage(search, cuts)
    exactly = "at least" if not search.large else "about"
    caps = sorted({ceil(cap * share) for cap in search.caps})
    least = " to ".join(format_bytes(cap) for cap in (caps if len(caps) < 2 else (caps[0], caps[-1])))
    hints = [f"give each device {exactly} {least}" if len(caps) == 1 else f"give devices {exactly} {least}"]
    if stages := fewest_stages(search, more):
        hints.append(f"use {stages} stages")
    hints.append("use smaller micro-batches")
    return InfeasibleError(
        f"no cut of {len(search.model)} ops into {len(search.caps)} stages fits: in the one that needs "
        f"least, stage {stage} needs {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}",
        hint=", or ".join(hints),
    )


def does_not_fit(search: Search, cuts: tuple[int, ...], name: str) -> InfeasibleError:
    """The error for a cut by a planner that does not look at memory."""
    stage, need = binding_stage(search, cuts)
    return InfeasibleError(
        f"planner {name} gives stage {stage} {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}",
        hint="use planner exact, which keeps to the cap, or more stages",
    )


def needs(search: Search, cuts: tuple[int, ...]) -> list[int]:
    """Bytes of each stage of a cut."""
    found = []
    for stage, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        footprint, _ = search.model.row(start, np.array([end]))
        found.append(int(search.model.memory(footprint, np.array([search.in_flight[stage]]))[0, 0]))
    return found


def binding_stage(search: Search, cuts: tuple[int, ...]) -> tuple[int, int]:
    """The stage that fills most of its cap, and its bytes."""
    sizes = needs(search, cuts)
    return max(enumerate(sizes), key=lambda pair: pair[1] / search.caps[pair[0]])


def fewest_stages(search: Search, more: Callable[[int], Search | None]) -> int | None:
    """The smallest number of stages, above the search's, with which something fits; None if none does.

    By bisection: more stages on more devices like these need less each. None too where looking would take
    long, for large graphs on many devices.
    """
    if search.large and len(search.caps) > MANY:
        return None
    low, high = len(search.caps), min(MORE_STAGES * len(search.caps), len(search.model.cut_points) - 1)
    widest = more(high) if high > low else None
    if widest is None or widest.smallest()[0] > 1:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        wider = more(middle)
        assert wider is not None  # the devices are alike, as the widest search showed
        low, high = (low, middle) if wider.smallest()[0] <= 1 else (middle, high)
    return high
