"""Why no cut fits: the stage that binds, and the least that would do. `plan_advice.py` tries the advice.

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
from ..ir.text import format_bytes
from .search.cut_search import Search
from .strategies.probe import filled


class NoCutFits(InfeasibleError):
    """No cut fits by estimate. share: of all caps, with which one does.  stages: how many would do."""

    def __init__(self, message: str, *, share: float = 0.0, stages: int | None = None) -> None:
        super().__init__(message)
        self.share, self.stages = share, stages


MANY = 16
MORE_STAGES = 4
"""Up to so many times the stages are tried when the smallest number that fits is sought."""

ROUGHLY = 0.01
"""Relative error of the smallest cap where memory is optimised."""


def explain_infeasible(
    search: Search,
    more: Callable[[int], Search | None],
) -> InfeasibleError:
    """The error for a search that found nothing.

    more: number of stages -> the search with so many, on devices like these; None if they differ.
    """
    share, cuts = least_share(search)
    stage, need = binding_stage(scale_caps(search, share), cuts)
    freed = ", even with all freed that may be" if search.optimises else ""
    return NoCutFits(
        f"no cut of {len(search.model)} ops into {len(search.caps)} stages fits{freed}: in the one that "
        f"needs least, stage {stage} needs {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}{_closely(need, search.caps[stage])}",
        share=share,
        stages=fewest_stages(search, more),
    )


def passes_caps(over: Sequence[int], cluster: Cluster, schedule: str) -> InfeasibleError:
    """The error where stages fit by the search's estimate, and no cut does once all its stages are known.

    over: bytes by which each rank passes its cap in the cut that comes closest.
    """
    rank = max(range(len(over)), key=over.__getitem__)
    cap = cluster.devices[rank].memory_bytes
    return InfeasibleError(
        f"no cut found keeps its caps with {schedule}: in the closest, rank {rank} holds "
        f"{format_bytes(cap + over[rank])}, its device's cap is {format_bytes(cap)}"
    )


def _closely(need: int, cap: int) -> str:
    """The difference, where both are printed alike."""
    alike = format_bytes(need) == format_bytes(cap) and need > cap
    return f", {format_bytes(need - cap)} less" if alike else ""


def does_not_fit(search: Search, cuts: tuple[int, ...], name: str) -> InfeasibleError:
    """The error for a cut by a planner that does not look at memory."""
    stage, need = binding_stage(search, cuts)
    return InfeasibleError(
        f"planner {name} gives stage {stage} {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}"
    )


def finds_no_chain(search: Search, name: str) -> InfeasibleError:
    """The error for a planner that counts memory in a way of its own: a cut that others find may fit."""
    return InfeasibleError(
        f"planner {name} finds no chain of {len(search.caps)} stages that fits by its own account of memory, "
        "the sum of what each piece needs"
    )


def stage_needs(search: Search, cuts: tuple[int, ...]) -> list[int]:
    """Bytes of each stage of a cut, with residuals freed as the search's caps demand, if they may be."""
    if search.optimises:
        bounds = enumerate(pairwise(cuts))
        return [round(search.evaluate(start, end, stage).peak_bytes) for stage, (start, end) in bounds]
    found = []
    for stage, (start, end) in enumerate(pairwise(cuts)):
        footprint, _ = search.model.row(start, np.array([end]))
        found.append(int(search.model.peaks(footprint, np.array([search.in_flight[stage]]))[0, 0]))
    return found


def binding_stage(search: Search, cuts: tuple[int, ...]) -> tuple[int, int]:
    """The stage that fills most of its cap, and its bytes."""
    sizes = stage_needs(search, cuts)
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
        smaller = scale_caps(search, middle)
        if found := filled(smaller.problem):
            high, cuts = middle, smaller.problem.positions(found)
        else:
            low = middle
    return high, cuts


def scale_caps(search: Search, share: float) -> Search:
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
