"""Cuts for several stages on each rank: ranks that take equally long, whatever their stages do.

Planners make the slowest stage as fast as can be. Of ranks with several stages each the slowest rank counts,
and its stages may be as uneven as they like, but for filling and draining the pipeline:

    m max over ranks (sum of their stages' turns) + (p - 1) max over stages (turn)    of m micro-batches

is made smaller by moving one cut, or two of them, by a few places, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from .cut_search import Search
from .problem import Cuts

STEPS = (1, 2, 4, 8)
"""Places by which a cut moves, to either side; two of them move by the first."""

PASSES = 40
"""Moves that are made at most."""


def even_ranks(search: Search, placement: Sequence[int], microbatches: int, cuts: Cuts) -> Cuts:
    """The cuts that this leads to from others; these where no move helps.

    placement: the rank of each stage.
    """
    points = search.model.cut_points.tolist()
    place = {point: at for at, point in enumerate(points)}
    ranks = max(placement) + 1

    def cost(places: Sequence[int]) -> float:
        loads, longest = [0.0] * ranks, 0.0
        for stage, rank in enumerate(placement):
            turn = search.evaluate(points[places[stage]], points[places[stage + 1]], stage).seconds
            loads[rank] += turn
            longest = max(longest, turn)
        return microbatches * max(loads) + (ranks - 1) * longest

    best = tuple(place[cut] for cut in cuts)
    least = cost(best)
    for _ in range(PASSES):
        better = next(((c, moved) for moved in _moves(best) if (c := cost(moved)) < (1 - 1e-9) * least), None)
        if better is None:
            break
        least, best = better
    return tuple(points[at] for at in best)


def _moves(places: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The places with one or two inner ones moved."""
    inner = range(1, len(places) - 1)
    changes = [{k: step} for size in STEPS for k in inner for step in (-size, size)]
    both = ((-1, -1), (-1, 1), (1, -1), (1, 1))
    changes += [{j: a, k: b} for j, k in combinations(inner, 2) for a, b in both]
    for change in changes:
        moved = tuple(at + change.get(k, 0) for k, at in enumerate(places))
        if all(a < b for a, b in zip(moved, moved[1:], strict=False)):
            yield moved
