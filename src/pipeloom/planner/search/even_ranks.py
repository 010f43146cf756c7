"""Cuts for several stages on each rank: ranks that take equally long, whatever their stages do.

Planners make the slowest stage as fast as can be. Of ranks with several stages each the slowest rank counts:

    m max over p ranks (sum of their stages' turns) + (p - 1) (sum of turn^2) / (sum of turn)

of m micro-batches. The second term stands for filling and draining the pipeline: the mean turn, each weighed
by itself. From stages that take equally long, an op that alone takes longer than that set apart, time is
moved from one stage to another, with all cuts in between, as long as that makes the sum smaller. So an op
that fills its rank alone leaves next to nothing to the other stages of that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..stage_cost.tensors import Array, Indices
from .cut_search import Search
from .problem import Cuts

SHARES = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015)
"""Of the mean turn that are moved between two stages; one place is tried, too."""

PASSES = 60
"""Moves that are made at most."""

TRIED = 6
"""Moves of each pass that are weighed in full: those that are best by compute alone."""

LESS = 1 - 1e-6


def turns_of_ranks(placement: Sequence[int], stages: int, microbatches: int) -> Array:
    """(stages, ranks): how many turns of a stage a rank takes in a step.

    placement: the rank of each stage, of one replica after another.
    """
    turns_of = np.zeros((stages, max(placement) + 1))
    for index, rank in enumerate(placement):
        turns_of[index % stages, rank] += microbatches * stages / len(placement)
    return turns_of


def nearest_places(middle: Array, seconds: Array | float) -> Indices:
    """The places before which compute takes most nearly so long. middle: seconds before each place."""
    after = np.clip(np.searchsorted(middle, seconds), 1, len(middle) - 1)
    nearer = seconds - middle[after - 1] < middle[after] - seconds
    return np.asarray(after - nearer, dtype=np.int64)


def steps_of(turns: Array, turns_of: Array) -> Array:
    """The formula on top of this module. turns: (cuts, stages).  turns_of: see `turns_of_ranks`."""
    # Weighing each turn by itself makes the mean sum t^2 / sum t: between the plain mean and the longest, and
    # smooth, so that of two cuts with the same busiest rank the more even one is shorter.
    filled = (turns**2).sum(axis=1) / np.maximum(turns.sum(axis=1), 1e-300)
    return np.asarray((turns @ turns_of).max(axis=1) + (turns_of.shape[1] - 1) * filled)


def even_ranks(search: Search, placement: Sequence[int], microbatches: int, *, bare: int = 0) -> Cuts:
    """The cuts that this leads to; () if a stage does not fit in any that were looked at.

    placement: the rank of each stage, of one replica after another.
    bare: stages in front, or behind if negative, that begin with one piece each, so that the rest is cut as
        for fewer stages.
    """
    climb = _Climb(search, placement, microbatches)
    places = climb.start(bare)
    if not len(places):
        return ()
    best = climb.cost(places)
    for _ in range(PASSES):
        better = climb.better(places, best)
        if better is None:
            break
        best, places = better
    return tuple(climb.points[places].tolist()) if best < np.inf else ()


class _Climb:
    """points: positions where cuts may be; places are numbers of points.
    at: seconds of compute before each of them, as each stage's device takes them.  middle: their mean.
    turns_of: see `turns_of_ranks`.
    """

    def __init__(self, search: Search, placement: Sequence[int], microbatches: int) -> None:
        self.search, self.points = search, search.model.cut_points
        self.stages = len(search.caps)
        self.at: Array = search.model.tables.prefix_s[np.array(search.model.kind)][:, self.points]
        self.middle: Array = self.at.mean(axis=0)
        self.turns_of = turns_of_ranks(placement, self.stages, microbatches)
        # Time moves from stage a to stage b with all cuts in between, so that the stages there keep theirs:
        #
        #     stages      0 | 1  |   2   |  3           from 3 to 1: the cuts 2 and 3 move up
        #              -> 0 | 1    |   2   |  3         1 is longer, 3 shorter, 2 as long as before
        #
        ends = np.array([(a, b) for a in range(self.stages) for b in range(self.stages) if a != b])
        cuts = np.arange(self.stages + 1)
        between = (cuts > ends.min(axis=1)[:, None]) & (cuts <= ends.max(axis=1)[:, None])
        self.between = {1: between[ends[:, 0] > ends[:, 1]], -1: between[ends[:, 0] < ends[:, 1]]}
        """1: from a stage to one in front, cuts move up; -1: to one behind."""

    def start(self, bare: int) -> Indices:
        """Places of cuts for stages that take equally long, but for those that are bare."""
        last = len(self.points) - 1
        front, behind = max(bare, 0), max(-bare, 0)
        if last < self.stages:
            return np.array([], dtype=np.int64)
        inner = self._evenly(front, last - behind, self.stages - front - behind)
        return np.array([*range(front + 1), *inner, *range(last - behind, last + 1)], dtype=np.int64)

    def _evenly(self, first: int, last: int, stages: int) -> list[int]:
        """Cuts between two places. A piece that takes more than its share is a stage of its own, if the
        pieces on both sides are then enough for the other stages."""
        if stages == 1:
            return []
        at = self.middle
        whole = at[last] - at[first]
        dear = first + int(np.argmax(np.diff(at[first : last + 1])))
        left, right = dear - first, last - dear - 1
        fewest, most = max(int(left > 0), stages - 1 - right), min(left, stages - 1 - int(right > 0))
        if (
            (rest := whole - (piece := at[dear + 1] - at[dear])) > 0
            and piece > whole / stages
            and fewest <= most
        ):
            front = min(max(round((stages - 1) * (at[dear] - at[first]) / rest), fewest), most)
            behind = stages - 1 - front
            cuts = [*self._evenly(first, dear, front), dear] if front else []
            return cuts + ([dear + 1, *self._evenly(dear + 1, last, behind)] if behind else [])
        cuts = []
        for stage in range(1, stages):
            low, high = (cuts or [first])[-1] + 1, last - (stages - stage)
            place = int(nearest_places(at, at[first] + whole * stage / stages))
            cuts.append(min(max(place, low), high))
        return cuts

    def better(self, places: Indices, best: float) -> tuple[float, Indices] | None:
        """The first of the most promising moves that costs less in full, and what; None if none does."""
        moved = self._moves(places)
        stage = np.arange(self.stages)
        turns = self.at[stage, moved[:, 1:]] - self.at[stage, moved[:, :-1]]
        by_compute = steps_of(turns, self.turns_of)
        for index in np.argsort(by_compute, kind="stable")[:TRIED]:
            if (cost := self.cost(moved[index])) < LESS * best:
                return cost, moved[index]
        return None

    def _moves(self, places: Indices) -> Indices:
        """Time, or a place, moved from each stage to each other: (moves, cuts)."""
        step_s = self.middle[-1] / self.stages
        found = []
        for side, between in self.between.items():
            to = [nearest_places(self.middle, self.middle[places] + side * s * step_s) for s in SHARES]
            found += [np.where(between, at, places) for at in (*to, places + side)]
        moved = np.concatenate(found)
        return np.asarray(moved[np.diff(moved, axis=1).min(axis=1) > 0], dtype=np.int64)

    def cost(self, places: Indices) -> float:
        """With transfers and what is freed; inf if a stage does not fit."""
        ends = pairwise(self.points[places].tolist())
        turns = [self.search.evaluate(i, j, stage).seconds for stage, (i, j) in enumerate(ends)]
        return float(steps_of(np.array([turns]), self.turns_of)[0]) if max(turns) < np.inf else np.inf
