"""probe: parametric search. Is there a cut whose stages all take at most tau seconds? Fill them one by one.

    PROBE(tau):  each stage takes as many ops as it can within tau; feasible if the last one gets the rest

While a stage's time only grows with its ops, this answers exactly, and the smallest tau is found in a few
steps: a cut that was found lowers the upper bound to its slowest stage; a failure raises the lower bound to
the least time with which some stage could have taken one piece more, below which the answer stays the same.

What crosses a cut breaks the order: its bytes vary from one place to the next, and with them the transfers
and the buffers of both stages. Then several ends of each stage are followed: the furthest, and around it
those that least bytes cross (`FOLLOW`, `WINDOW`), and a dynamic programme looks at what is left: at all
cuts whose stages may be faster, by their compute alone, than those that were found, if these are few; the
answer is then exact again. If they are many it looks at a band around the cuts that were found, which is a
heuristic: bench/planners.py measures how far it is from `exact`.

Source: for the search without memory, Pinar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D
partitioning", JPDC 64(8).
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf

from ..search.cut_search import Search
from ..search.problem import (
    Bands,
    Cuts,
    Partition,
    Problem,
    bands_around,
    bands_below,
    best_cuts_within,
    count_intervals,
    largest,
)

WINDOW, FOLLOW = 8, 3
"""Where crossing bytes vary, places on either side that are looked at, and ends of each stage that are
followed."""

STEPS = 60
ABOVE = (0.02, 0.08, 0.25, 0.7, 2.0, 6.0, inf)
"""Shares above perfect division at which the first partition is sought."""

FEW = 20_000
"""Intervals up to which all cuts that are left may be tried."""


def probe(search: Search) -> Cuts:
    """Cut positions, 0 and the number of ops included; () if nothing fits."""
    problem = search.problem
    return problem.positions(parametric_search(problem, tolerance=search.tolerance).cuts)


def parametric_search(problem: Problem, *, tolerance: float = 1e-9, mend: bool = True) -> Partition:
    """The best partition that parametric search finds; see the module's docstring.

    tolerance: relative, of the slowest stage's time, at which to stop.
    mend: try other cuts where crossing bytes vary, as the module's docstring says; if not, filling is all.
    """
    even = len({problem.crossing(point) for point in problem.points[1:-1]}) <= 1
    mend = mend and not even
    low = problem.least_of(0, problem.last, range(problem.stages))
    best = Partition()
    # Upwards from what perfect division would take: long intervals, which are dear to weigh, come last.
    for tau in [low * (1 + above) for above in ABOVE] if low > 0 else [inf]:
        if tau >= low:
            best, blocked = _within(problem, tau, wide=mend)
            if best.cuts:
                break
            low = max(tau, blocked) if even else tau
    if not best.cuts:
        return _all_left(problem, inf) if mend else best
    for _ in range(STEPS):
        if best.seconds <= low * (1 + tolerance):
            break
        tau = (low + best.seconds) / 2
        found, blocked = _within(problem, tau, wide=mend)
        if found.cuts:
            best = found
        else:
            low = max(tau, min(blocked, best.seconds)) if even else tau
    if not mend:
        return best
    better = _all_left(problem, best.seconds, bands_around(problem, best.cuts, WINDOW))
    return better if better.cuts else best


def _all_left(problem: Problem, below: float, otherwise: Bands = ()) -> Partition:
    """The best partition faster than `below`, among all if few are left, else in the other bands; nothing if
    there is none."""
    left = bands_below(problem, below)
    bands = left if count_intervals(left) <= FEW else otherwise
    return best_cuts_within(problem, bands, below=below) if bands else Partition()


def filled(problem: Problem) -> Cuts:
    """The cuts that come of filling each stage as far as memory allows; () if it does not lead to the end."""
    return _within(problem, inf, wide=True)[0].cuts


def _within(problem: Problem, tau: float, *, wide: bool) -> tuple[Partition, float]:
    """A partition into stages of at most `tau` seconds, none if filling finds none; and the smallest tau at
    which filling would go another way."""
    starts: dict[int, Cuts] = {0: (0,)}
    blocked = inf
    for stage in range(problem.stages - 1):
        starts, here = _ends(problem, starts, stage, tau, wide)
        blocked = min(blocked, here)
        if not starts:
            return Partition(), blocked
    final = problem.stages - 1
    for start in sorted(starts, reverse=True):
        seconds = problem.at(start, problem.last, final).seconds
        if seconds <= tau and seconds < inf:
            return problem.weigh((*starts[start], problem.last)), blocked
        blocked = min(blocked, seconds)
    return Partition(), blocked


def _ends(
    problem: Problem, starts: dict[int, Cuts], stage: int, tau: float, wide: bool
) -> tuple[dict[int, Cuts], float]:
    """Where a stage may end, places with the cuts that lead there; and the least time to go further."""
    most = problem.last - (problem.stages - 1 - stage)
    descending = sorted(starts, reverse=True)
    for start in descending:
        furthest = _furthest(problem, start, most, stage, tau)
        if furthest > start:
            break
    else:
        return {}, min(_seconds(problem, start, start + 1, stage, most) for start in descending)
    found = {furthest: (*starts[start], furthest)}
    blocked = _seconds(problem, start, furthest + 1, stage, most)
    near = range(max(furthest - WINDOW, 1), min(furthest + WINDOW, most) + 1) if wide else ()
    for place in sorted(near, key=lambda place: (problem.crossing(problem.points[place]), -place)):
        if len(found) >= FOLLOW:
            break
        for start in descending if place != furthest else ():
            if start < place and problem.least_s(start, place, stage) <= tau:
                seconds = problem.at(start, place, stage).seconds
                if seconds <= tau and seconds < inf:
                    found[place] = (*starts[start], place)
                    break
    return found, blocked


def _furthest(problem: Problem, start: int, most: int, stage: int, tau: float) -> int:
    """The last place to which a stage can run from `start` within `tau`; `start` if nowhere."""
    reach = bisect_left(
        range(start + 1, most + 1), True, key=lambda end: problem.least_s(start, end, stage) > tau
    )

    def good(end: int) -> bool:
        seconds = problem.at(start, end, stage).seconds
        return seconds <= tau and seconds < inf

    return largest(start, start + reach, good)


def _seconds(problem: Problem, start: int, end: int, stage: int, most: int) -> float:
    return problem.at(start, end, stage).seconds if end <= most else inf
