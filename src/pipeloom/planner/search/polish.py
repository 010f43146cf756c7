"""The last step of a search: cuts moved by a few ops, accepted by the simulated step.

A search weighs a plan by its slowest stage. Of plans with equally slow ones some fill and drain the pipeline
faster, and what a greedy choice of treatments takes jumps from one cut to the next; so the plan of a larger
cap may be slower than that of a smaller one. Moves by the simulated step make both rare.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..candidate import Candidate
from ..fit_caps import fit_caps
from .cut_search import Search

STEPS = (1, 2, 4)
"""Places by which a cut moves, to either side."""

BUDGET = 120_000
"""Micro-batches times stages that all simulations of one search may have together."""

MOST, MOST_OF_LARGE = 200, 60
"""Moves that are tried at most, and of large graphs, whose stages take long to weigh."""

GAIN = 1e-6
"""Share of the step that a move has to save."""

Cuts = tuple[int, ...]


def polish_cuts(kept: Sequence[Candidate], search: Search) -> Candidate:
    """The fastest of some plans that keep their caps, or what becomes of it; never slower.

    search: that of the planner, in which the others' cuts are weighed, too.
    """
    best = min(kept, key=lambda found: found.timeline.step_s)
    if len(search.caps) < 2:
        return best
    climb = _Climb(best)
    for found in kept:
        if found.search.model.readers == search.model.readers:  # positions in the same op order
            climb.try_(search, found.cuts)
    places = best.search.model.cut_points.tolist()
    while any(climb.try_(climb.best.search, cuts) for cuts in _moves(climb.best, places)):
        pass
    return climb.best


class _Climb:
    """The best so far, and what was tried."""

    def __init__(self, best: Candidate) -> None:
        request = best.request
        self.best = best
        most = MOST_OF_LARGE if best.search.large else MOST
        self.left = min(most, BUDGET // (request.microbatches * len(best.search.caps)))
        self.tried = {(id(best.search), best.cuts)}

    def try_(self, search: Search, cuts: Cuts) -> bool:
        """Whether these cuts are faster; then they are the best."""
        key = id(search), cuts
        if key in self.tried or self.left <= 0:
            return False
        self.tried.add(key)
        self.left -= 1
        if not search.by_depth and not all(
            search.evaluate(i, j, s).fits for s, (i, j) in enumerate(pairwise(cuts))
        ):
            return False
        found = fit_caps(self.best.request, search, cuts)
        if (
            not found.fits
            or found.tighter() is not None
            or found.timeline.step_s >= (1 - GAIN) * self.best.timeline.step_s
        ):
            return False
        self.best = found
        return True


def _moves(found: Candidate, places: Sequence[int]) -> Iterator[Cuts]:
    """Its cuts with one of them moved; those beside its slowest stages first."""
    cuts = found.cuts
    turns = [part.turn_s for part in found.parts]
    order = sorted(range(1, len(cuts) - 1), key=lambda k: -max(turns[k - 1], turns[k]))
    for step in STEPS:
        for k in order:
            at = bisect_left(places, cuts[k])
            for to in (at - step, at + step):
                if 0 <= to < len(places) and cuts[k - 1] < places[to] < cuts[k + 1]:
                    yield (*cuts[:k], places[to], *cuts[k + 1 :])
