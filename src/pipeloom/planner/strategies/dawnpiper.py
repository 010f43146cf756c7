"""dawnpiper: halve the stages, bisect the cut between the halves, and again within each half.

DawnPiper-style, reconstructed from the abstract of arXiv 2505.05856 (its text was not available); the theorem
is our reading with our proof. Of two neighbours the best cut lies between the one that balances compute and
the one that balances memory, if adding ops to a stage never makes it faster and the stage that is fuller pays
at least as much for freeing memory. So that interval is bisected: the cut moves right while the left half is
faster, and memory is optimised tensor by tensor wherever a stage is weighed.

Proof: cut p gives times T1, T2 and bytes M1, M2; O is the least extra time that frees what is beyond the cap,
and F = T + O. Let the memory-balanced cut be on the left. Right of the compute-balanced cut T1 >= T2 and
M1 >= M2, so F1 >= F2 by the second assumption, and further right only increases F1 by the first. Left of the
memory-balanced cut everything is reversed. The other order is symmetric.

The second assumption fails under tight memory (the interval may then hold no cut that fits), so:

    neighbours   `WIDTH` places on either side of the interval belong to it, and around the best cut
    band         where crossing bytes vary, all cuts near those found are tried together
    widening     if the bisection ends at an edge of the interval that still improves, it goes on beyond it,
                 in steps that double
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..search.cut_search import Search
from ..search.problem import Cuts, Key, Partition, Problem, bands_around, best_cuts_within
from .probe import parametric_search

WIDTH = 2
"""Neighbours of the theorem's interval, and of the best cut, that are looked at too."""

BAND = 4
"""Where what crosses a cut varies from place to place, neither half's time only grows with its ops; then all
cuts up to so many widths from those found are tried together; one width with many stages."""

TOGETHER = 8
"""Stages up to which halves are solved at each step of the bisection; larger halves are compared by what
parametric search (probe.py) reaches in them, and solved only at the cut that was chosen."""

ROUGHLY = 0.03
"""Relative tolerance of that."""


def dawnpiper(search: Search) -> Cuts:
    """Cut positions, 0 and the number of ops included; () if nothing fits."""
    problem = search.problem
    return problem.positions(binary_partition(problem).cuts)


def binary_partition(problem: Problem) -> Partition:
    if problem.last < problem.stages:
        return Partition()
    halving = _Halving(problem)
    found = halving.solve(0, problem.last, 0, problem.stages)
    best = Partition(found.key[1], found.cuts) if found.key[0] == 0 else Partition()
    even = len({problem.crossing(point) for point in problem.points[1:-1]}) <= 1
    if even and problem.stages <= TOGETHER:
        return best
    filled = parametric_search(problem)
    best = filled if filled.seconds < best.seconds else best
    near = WIDTH * (1 if even or problem.stages > TOGETHER else BAND)
    better = best_cuts_within(
        problem, bands_around(problem, best.cuts or found.cuts, near), below=best.seconds
    )
    return better if better.cuts else best


class _Solved(NamedTuple):
    key: Key
    cuts: Cuts


@dataclass
class _Halving:
    """The recursion; `solve` remembers."""

    problem: Problem
    known: dict[tuple[int, int, int, int], _Solved] = field(default_factory=dict)
    rough: dict[tuple[int, int, int, int], Key] = field(default_factory=dict)
    before: dict[tuple[int, int], int] = field(default_factory=dict)

    def solve(self, i: int, j: int, a: int, b: int) -> _Solved:
        """What lies between the places i and j, cut into the stages a..b-1."""
        key = (i, j, a, b)
        if key not in self.known:
            one = b - a == 1
            self.known[key] = _Solved(self.problem.key(i, j, a), (i, j)) if one else self._halved(i, j, a, b)
        return self.known[key]

    def _halved(self, i: int, j: int, a: int, b: int) -> _Solved:
        mid = a + (b - a) // 2
        first, last = i + (mid - a), j - (b - mid)
        apart = b - a > TOGETHER
        weigh = self._filled if apart else self._key

        def turned(p: int) -> bool:
            """Whether the left half is the slower one, so that the best cut is not to the right."""
            return weigh(i, p, a, mid) >= weigh(p, j, mid, b)

        # Where both halves take equally long if each divides its compute perfectly; and where both fill equal
        # shares of their caps if each divides its memory perfectly.
        least, share, inner = self.problem.least_of, self._share, (i + 1, j - 1)
        left, right = range(a, mid), range(mid, b)
        compute = first_turned(lambda p: least(i, p, left) >= least(p, j, right), *inner, inner)
        memory = first_turned(lambda p: share(i, p, left) >= share(p, j, right), *inner, inner)
        low = min(max(min(compute, memory) - WIDTH, first), last)
        high = min(max(max(compute, memory) + WIDTH, first), last)
        # Where these stages were cut before, of pieces that differed a little, is a good place to begin.
        if (before := self.before.get((a, b))) is not None:
            low = high = min(max(before, low), high)
        at = first_turned(turned, low, high, (first, last))
        self.before[a, b] = at
        near = 0 if apart else WIDTH
        best = self._joined(i, at, j, a, mid, b)
        for p in range(max(first, at - 1 - near), min(last, at + near) + 1):
            # What is slower by its compute alone need not be solved.
            if p != at and self._least(i, p, j, a, mid, b) < best.key:
                best = min(best, self._joined(i, p, j, a, mid, b), key=lambda found: found.key)
        return best

    def _key(self, i: int, j: int, a: int, b: int) -> Key:
        return self.solve(i, j, a, b).key

    def _least(self, i: int, p: int, j: int, a: int, mid: int, b: int) -> Key:
        """A key that no solution with this cut is below; exact for the halves that are solved already."""
        left = self.known.get((i, p, a, mid))
        right = self.known.get((p, j, mid, b))
        least = self.problem.least_of
        return max(
            (0.0, least(i, p, range(a, mid))) if left is None else left.key,
            (0.0, least(p, j, range(mid, b))) if right is None else right.key,
        )

    def _joined(self, i: int, p: int, j: int, a: int, mid: int, b: int) -> _Solved:
        left, right = self.solve(i, p, a, mid), self.solve(p, j, mid, b)
        return _Solved(max(left.key, right.key), (*left.cuts, *right.cuts[1:]))

    def _filled(self, i: int, j: int, a: int, b: int) -> Key:
        """Of many stages: what parametric search reaches, roughly."""
        key = (i, j, a, b)
        if key not in self.rough:
            found = parametric_search(self.problem.part(i, j, range(a, b)), tolerance=ROUGHLY, mend=False)
            self.rough[key] = (0.0 if found.cuts else 1.0, found.seconds)
        return self.rough[key]

    def _share(self, start: int, end: int, stages: range) -> float:
        # Stage s would fill a share f_s of its cap with all of it, and fills a_s f_s with a part a_s. If all
        # fill the same share x, the parts are x / f_s and add up to 1: x = 1 / sum of 1 / f_s.
        filled = self.problem.filled(start, end)[stages.start : stages.stop]
        return 1 / sum(1 / f for f in filled) if all(f > 0 for f in filled) else 0.0


def first_turned(turned: Callable[[int], bool], low: int, high: int, limits: tuple[int, int]) -> int:
    """The first number of which `turned` is true, sought in [low, high] and then, in doubling steps, up to
    the limits; the upper limit if it is true of none.

    >>> [first_turned(lambda n: n >= true_from, 4, 6, (0, 20)) for true_from in (5, 15, 1, 40)]
    [5, 15, 1, 20]
    """
    step = 1
    while turned(low) and low > limits[0]:
        low, high, step = max(limits[0], low - step), low, 2 * step
    step = 1
    while not turned(high) and high < limits[1]:
        low, high, step = high, min(limits[1], high + step), 2 * step
    return bisect_left(range(low, high), True, key=turned) + low
