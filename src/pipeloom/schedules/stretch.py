"""Schedules of many micro-batches from those of few: the steady state is repeated, not ordered again.

A clock that starts a micro-batch every so often leads to rows that repeat themselves in the middle. Where two
periods in a row are the same on all ranks, up to the number of the micro-batch, another such period may stand
between them: all that it needs has then run as long before it, and it holds as much.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import takewhile

from ..ir.action import Action, F
from .made import Made
from .recipe import Recipe, per_rank
from .shape import Shape
from .task import EPS, Outcome

MOST = 4
"""Micro-batches of the longest period that is looked for."""


def stretched(few: Made, small: Shape, recipe: Recipe, microbatches: int) -> Made | None:
    """What a recipe gives for more micro-batches, from what it gives for few; None if nothing repeats.

    recipe: for all micro-batches; `few` has the one for few.  Only for recipes by a clock that is the same
    for each micro-batch, and the same for both.
    """
    if not _same(few.recipe, recipe, small, microbatches) or not _within(few.outcome, recipe):
        return None
    outcome = _stretched(few.outcome, small, microbatches)
    return None if outcome is None else Made(recipe=recipe, outcome=outcome)


def _stretched(few: Outcome, small: Shape, microbatches: int) -> Outcome | None:
    more = microbatches - small.microbatches
    stage = small.flow.order[0]
    rank = small.placement[stage]
    row = zip(few.rows[rank], few.starts[rank], strict=True)
    begins = [start for a, start in row if (a.stage, a.kind) == (stage, F)]
    for size in (size for size in range(1, MOST + 1) if more % size == 0):
        for first in range(len(begins) - 2 * size - 1, len(begins) // 2, -1):
            middle, end = begins[first + size], begins[first + 2 * size]
            period = end - middle
            if abs(period - (middle - begins[first])) > EPS:
                continue
            cuts = (_cut(few, r, middle, period, size) for r in range(small.ranks))
            found = [cut for cut in takewhile(lambda cut: cut is not None, cuts) if cut is not None]
            if len(found) == small.ranks:
                return _longer(few, found, period, size, more // size)
    return None


def _same(few: Recipe, many: Recipe, s: Shape, microbatches: int) -> bool:
    """Whether two recipes have one clock, with the same time from each micro-batch to the next."""
    short, clock = few.clock, many.clock
    if short is None or clock is None or many.slices > 1 or many.insert:
        return False
    if many.before is not None or many.together is not None:
        return False
    last = microbatches - 1
    step = clock(0, F, 1) - clock(0, F, 0)
    near = EPS * max(1.0, abs(step) * last)
    return all(
        abs(clock(stage, kind, last) - clock(stage, kind, 0) - step * last) < near
        and abs(clock(stage, kind, 0) - short(stage, kind, 0)) < near
        for stage in range(len(s.placement))
        for kind in many.kinds_of(stage)
    )


def _within(few: Outcome, recipe: Recipe) -> bool:
    if recipe.memory_bytes is not None or recipe.in_flight or recipe.in_flight_stage:
        return False
    if recipe.memory is None:
        return True
    return all(peak <= per_rank(recipe.memory, r) + EPS for r, peak in enumerate(few.peak))


def _cut(few: Outcome, rank: int, middle: float, period: float, size: int) -> tuple[int, int] | None:
    """Where the second of two equal periods of a rank begins and ends in its row, if they are equal."""
    starts, row = few.starts[rank], few.rows[rank]
    low, here, high = (bisect_left(starts, middle + k * period - EPS) for k in (-1, 0, 1))
    kinds = len({(a.stage, a.kind) for a in row})
    if not high - here == here - low == size * kinds:
        return None
    for i in range(low, here):
        a, b = row[i], row[i + here - low]
        if (a.stage, a.kind, a.microbatch + size) != (b.stage, b.kind, b.microbatch):
            return None
        if abs(starts[i + here - low] - starts[i] - period) > 4 * EPS:
            return None
    return here, high


def _longer(few: Outcome, cuts: list[tuple[int, int]], period: float, size: int, times: int) -> Outcome:
    rows, starts = [], []
    for row, begun, (here, high) in zip(few.rows, few.starts, cuts, strict=True):
        made, begins = list(row[:high]), list(begun[:high])
        for k in range(1, times + 1):
            made += [Action(a.stage, a.kind, a.microbatch + k * size) for a in row[here:high]]
            begins += [start + k * period for start in begun[here:high]]
        made += [Action(a.stage, a.kind, a.microbatch + times * size) for a in row[high:]]
        begins += [start + times * period for start in begun[high:]]
        rows.append(tuple(made))
        starts.append(tuple(begins))
    later = times * period
    return replace(
        few, rows=tuple(rows), starts=tuple(starts), step_s=few.step_s + later, span_s=few.span_s + later
    )
