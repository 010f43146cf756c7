"""Schedules of many micro-batches from those of few: the steady state is repeated, not ordered again.

A clock that starts a micro-batch every so often leads to rows that repeat themselves in the middle. Where two
periods in a row are the same on all ranks, up to the number of the micro-batch, another such period may stand
between them: all that it needs has then run as long before it, and it holds as much.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...ir.action import F
from ...ir.columns import F_, Columns, Rows, columns_of
from ..language.recipe import Recipe, per_rank
from ..language.shape import Shape
from .engine import ScheduledRecipe
from .tables import EPS

MOST = 4


def stretched(
    few: ScheduledRecipe, small: Shape, recipe: Recipe, microbatches: int
) -> ScheduledRecipe | None:
    """What a recipe gives for more micro-batches, from what it gives for few; None if nothing repeats. Only
    for recipes by a clock that is the same for each micro-batch, and for few and many."""
    if not _same(few.recipe, recipe, small, microbatches):
        return None
    more = microbatches - small.microbatches
    if recipe.memory_bytes is not None or recipe.in_flight or recipe.in_flight_stage:
        return None
    if recipe.memory is not None and any(
        peak > per_rank(recipe.memory, r) + EPS for r, peak in enumerate(few.peak)
    ):
        return None
    stage = small.flow.order[0]
    rank = small.placement[stage]
    columns = columns_of(few.rows)
    row = slice(*columns.offsets[rank : rank + 2])
    begins = few.starts[rank][(columns.stage[row] == stage) & (columns.kind[row] == F_)]
    for size in (size for size in range(1, MOST + 1) if more % size == 0):
        for first in range(len(begins) - 2 * size - 1, len(begins) // 2, -1):
            middle, end = float(begins[first + size]), float(begins[first + 2 * size])
            period = end - middle
            if abs(period - (middle - begins[first])) > EPS:
                continue
            rank_cuts: list[tuple[int, int]] = []
            for r in range(small.ranks):
                if cut := _cut(few, columns, r, middle, period, size):
                    rank_cuts.append(cut)
                else:
                    break
            if len(rank_cuts) == small.ranks:
                return replace(_longer(few, columns, rank_cuts, period, size, more // size), recipe=recipe)
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


def _cut(
    few: ScheduledRecipe, columns: Columns, rank: int, middle: float, period: float, size: int
) -> tuple[int, int] | None:
    """Where the second of two equal periods of a rank begins and ends in its row, if they are equal."""
    starts, begin = few.starts[rank], int(columns.offsets[rank])
    low, here, high = np.searchsorted(starts, [middle + k * period - EPS for k in (-1, 0, 1)]).tolist()
    streams = columns.stage.astype(np.int64) * len(columns.kinds) + columns.kind
    kinds = len(np.unique(streams[begin : int(columns.offsets[rank + 1])]))
    if not high - here == here - low == size * kinds:
        return None
    one, two = slice(begin + low, begin + here), slice(begin + here, begin + high)
    same = np.array_equal(streams[one], streams[two]) and np.array_equal(
        columns.microbatch[one] + size, columns.microbatch[two]
    )
    moved = np.abs(starts[here:high] - starts[low:here] - period)
    return (here, high) if same and (moved <= 4 * EPS).all() else None


def _longer(
    few: ScheduledRecipe, columns: Columns, cuts: list[tuple[int, int]], period: float, size: int, times: int
) -> ScheduledRecipe:
    entries, later, starts = [], [], []
    for rank, (here, high) in enumerate(cuts):
        count = len(few.starts[rank])
        again = np.arange(1, times + 1)
        entry = np.concatenate(
            [np.arange(high), np.tile(np.arange(here, high), times), np.arange(high, count)]
        )
        turn = np.concatenate(
            [np.zeros(high, np.int64), np.repeat(again, high - here), np.full(count - high, times)]
        )
        entries.append(entry + columns.offsets[rank])
        later.append(turn * size)
        starts.append(few.starts[rank][entry] + turn * period)
    entry = np.concatenate(entries)
    offsets = np.concatenate([[0], np.cumsum([len(start) for start in starts])]).astype(np.int64)
    made = Columns(
        kind=columns.kind[entry],
        stage=columns.stage[entry],
        peer=columns.peer[entry],
        microbatch=columns.microbatch[entry] + np.concatenate(later).astype(np.int32),
        offsets=offsets,
        kinds=columns.kinds,
    )
    more = times * period
    return replace(
        few, rows=Rows(made), starts=tuple(starts), step_s=few.step_s + more, span_s=few.span_s + more
    )
