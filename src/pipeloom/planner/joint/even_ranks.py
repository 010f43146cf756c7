"""Cuts for several stages on each rank: ranks that take equally long, whatever their stages do.

Planners make the slowest stage as fast as can be. Of ranks with several stages each the slowest rank counts,
and filling and draining the pipeline: `ClosedForm`. From stages that take equally long, an op that alone
takes longer than that set apart, time is moved from one stage to another, with all cuts in between, as long
as that makes the step shorter. So an op that fills its rank alone leaves next to nothing to the other stages
of that rank.
"""

from __future__ import annotations

import numpy as np

from ..placement import Layout
from ..search.cut_search import Search
from ..search.problem import Cuts
from ..stage_cost.tensors import Array, Indices
from .estimates import LESS, PASSES, SHARES, ClosedForm, CutTimes, nearest_places

TRIED = 6
"""Moves of each pass that are weighed in full: those that are best by compute alone."""


def even_ranks(search: Search, layout: Layout, microbatches: int, *, bare: int = 0) -> Cuts:
    """The cuts that this leads to; () if a stage does not fit in any that were looked at.

    bare: stages in front, or behind if negative, that begin with one piece each, so that the rest is cut as
        for fewer stages.
    """
    everywhere = search.model.cut_points.tolist()
    quick, full = (
        ClosedForm(CutTimes(search, layout, microbatches, weighed=weighed, also=everywhere))
        for weighed in (False, True)
    )
    places = _start(quick.cuts, bare)
    if not len(places):
        return ()
    best = float(full.steps(places[None])[0])
    for _ in range(PASSES):
        moved = _moves(quick.cuts, places)
        few = (moved[index] for index in np.argsort(quick.steps(moved), kind="stable")[:TRIED])
        better = next(((step, to) for to in few if (step := full.steps(to[None])[0]) < LESS * best), None)
        if better is None:
            break
        best, places = better
    return quick.cuts.cut(places) if best < np.inf else ()


def _start(cuts: CutTimes, bare: int) -> Indices:
    """Places of cuts for stages that take equally long, but for those that are bare."""
    last = len(cuts.points) - 1
    front, behind = max(bare, 0), max(-bare, 0)
    if last < cuts.stages:
        return np.array([], dtype=np.int64)
    inner = _evenly(cuts.middle, front, last - behind, cuts.stages - front - behind)
    return np.array([*range(front + 1), *inner, *range(last - behind, last + 1)], dtype=np.int64)


def _evenly(at: Array, first: int, last: int, stages: int) -> list[int]:
    """Cuts between two places. A piece that takes more than its share is a stage of its own, if the
    pieces on both sides are then enough for the other stages."""
    if stages == 1:
        return []
    whole = at[last] - at[first]
    dear = first + int(np.argmax(np.diff(at[first : last + 1])))
    left, right = dear - first, last - dear - 1
    fewest, most = max(int(left > 0), stages - 1 - right), min(left, stages - 1 - int(right > 0))
    if (rest := whole - (piece := at[dear + 1] - at[dear])) > 0 and piece > whole / stages and fewest <= most:
        front = min(max(round((stages - 1) * (at[dear] - at[first]) / rest), fewest), most)
        behind = stages - 1 - front
        cuts = [*_evenly(at, first, dear, front), dear] if front else []
        return cuts + ([dear + 1, *_evenly(at, dear + 1, last, behind)] if behind else [])
    cuts = []
    for stage in range(1, stages):
        low, high = (cuts or [first])[-1] + 1, last - (stages - stage)
        place = int(nearest_places(at, at[first] + whole * stage / stages))
        cuts.append(min(max(place, low), high))
    return cuts


def _moves(cuts: CutTimes, places: Indices) -> Indices:
    """Time, or a place, moved from each stage to each other: (moves, cuts)."""
    # With all cuts in between, so that the stages there keep theirs:
    #
    #     stages      0 | 1  |   2   |  3           from 3 to 1: the cuts 2 and 3 move up
    #              -> 0 | 1    |   2   |  3         1 is longer, 3 shorter, 2 as long as before
    #
    ends = np.array([(a, b) for b in range(cuts.stages) for a in range(b)])
    at, step_s, found = np.arange(cuts.stages + 1), cuts.middle[-1] / cuts.stages, []
    between = (at > ends[:, :1]) & (at <= ends[:, 1:])
    for side in (1, -1):
        to = [nearest_places(cuts.middle, cuts.middle[places] + side * s * step_s) for s in SHARES]
        found += [np.where(between, moved, places) for moved in (*to, places + side)]
    moved = np.concatenate(found)
    return np.asarray(moved[np.diff(moved, axis=1).min(axis=1) > 0], dtype=np.int64)
