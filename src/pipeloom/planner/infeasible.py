"""What to say when no cut fits: the stage that binds, and the least that would do.

With memory optimisation the least is what remains when everything is freed that may be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

import numpy as np

from ..ir.errors import InfeasibleError
from ..ir.units import format_bytes
from .evaluation import Evaluation
from .probe import fill, fits_at_all
from .search import Search

MANY = 16
MORE_STAGES = 4
"""Up to so many times the stages are tried when the smallest number that fits is sought."""

ROUGHLY = 0.01
"""Relative error of the smallest cap where memory is optimised."""


def explain_infeasible(
    search: Search, more: Callable[[int], Search | None], largest: Callable[[], int | None] | None = None
) -> InfeasibleError:
    """The error for a search that found nothing.

    more: number of stages -> the search with so many, on devices like these; None if they differ.
    largest: the largest micro-batch size with a plan, None if unknown.
    """
    share, cuts = least_share(search)
    hints = []
    if cuts:
        stage, need = binding_stage(search, cuts)
        binds = (
            f"in the one that needs least, stage {stage} needs {format_bytes(need)}, its device's cap is "
            f"{format_bytes(search.caps[stage])}"
        )
        exactly = "at least" if not (search.large or search.optimises) else "about"
        caps = sorted({ceil(cap * share) for cap in search.caps})
        least = " to ".join(format_bytes(cap) for cap in (caps if len(caps) < 2 else (caps[0], caps[-1])))
        hints.append(f"give {'each device' if len(caps) == 1 else 'devices'} {exactly} {least}")
    else:
        binds = "some stage holds too much whatever is freed"
    if stages := fewest_stages(search, more):
        hints.append(f"use {stages} stages")
    if not search.optimises:
        hints.append("let residuals be recomputed or offloaded (planner dawnpiper)")
    size = largest() if largest is not None else None
    hints.append(f"use micro-batches of at most {size} rows" if size else "use smaller micro-batches")
    freed = ", even with all freed that may be" if search.optimises else ""
    return InfeasibleError(
        f"no cut of {len(search.model)} ops into {len(search.caps)} stages fits{freed}: {binds}",
        hint=", or ".join(hints),
    )


def does_not_fit(search: Search, cuts: tuple[int, ...], name: str) -> InfeasibleError:
    """The error for a cut by a planner that does not look at memory."""
    stage, need = binding_stage(search, cuts)
    return InfeasibleError(
        f"planner {name} gives stage {stage} {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}",
        hint="use planner dawnpiper, which keeps to the cap and frees memory, or more stages",
    )


def needs(search: Search, cuts: tuple[int, ...]) -> list[int]:
    """Bytes of each stage of a cut: with every residual kept, or, where they may be freed, the least."""
    if search.optimises:
        least = search.with_least_memory.evaluate
        return [
            round(least(start, end, stage).peak_bytes) for stage, (start, end) in enumerate(pairwise(cuts))
        ]
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
    """The share of the caps with which some cut fits, and that cut; (inf, ()) if none is found.

    Above 1 where nothing fits. Where memory is optimised the least of each stage is known, and its largest
    share is minimised as seconds are elsewhere.
    """
    if not search.optimises:
        return search.smallest()
    least, caps = search.with_least_memory, search.caps

    def share(start: int, end: int, stage: int) -> Evaluation:
        peak = least.evaluate(start, end, stage).peak_bytes
        return Evaluation(seconds=peak / caps[stage] if peak < inf else inf, peak_bytes=peak)

    # Nothing is known of a share before it is asked for, so the bound from compute is 0.
    problem = replace(search.problem, evaluate=share, compute_s=lambda start, end, stage: 0.0)
    _, whole = search.smallest()
    start = tuple(bisect_left(problem.points, cut) for cut in whole)
    found = fill(problem, tolerance=ROUGHLY, mend=False, start=start)
    return found.seconds, problem.positions(found.cuts)


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
    return fits_at_all(search.problem) if search.optimises else search.smallest()[0] <= 1
