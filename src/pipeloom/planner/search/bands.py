"""The dynamic programme over places, asked for interval by interval, each cut within a band.

    best[s + 1][j] = min over i < j of  max(best[s][i], F_s(i, j))

Intervals whose compute alone is too long are never evaluated, nor ends that leave too much for the stages
that follow. With bands as wide as the problem the result is exact, whatever the times are like.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf

from .problem import Cuts, Partition, Problem

Bands = Sequence[Sequence[int]]
"""For each cut, both ends included, the places where it may be, ascending."""


def all_bands(problem: Problem) -> Bands:
    """All places: the search is then exact, whatever the times are like."""
    last, stages = problem.last, problem.stages
    inner = [range(s, last - (stages - s) + 1) for s in range(1, stages)]
    return [(0,), *inner, (last,)]


def bands_around(problem: Problem, cuts: Cuts, width: int) -> Bands:
    """Places within `width` of the cuts."""
    bands = all_bands(problem)
    return [
        [place for place in band if abs(place - cut) <= width] for band, cut in zip(bands, cuts, strict=True)
    ]


def bands_below(problem: Problem, below: float) -> Bands:
    """The places that a partition whose stages all compute for less than `below` seconds can have cuts at:
    the stages in front must get that far, and those behind must be able to take the rest."""
    latest, earliest = [0], [problem.last]
    for stage in range(problem.stages - 1):
        latest.append(_reach(problem, latest[-1], stage, below))
    for stage in range(problem.stages - 1, 0, -1):
        earliest.append(_reach_back(problem, earliest[-1], stage, below))
    limits = zip([0, *reversed(earliest)], [*latest, problem.last], strict=True)
    return [
        [place for place in band if a <= place <= b]
        for band, (a, b) in zip(all_bands(problem), limits, strict=True)
    ]


def count_intervals(bands: Bands) -> int:
    """How many intervals with both ends in the bands there are, at most."""
    return sum(len(starts) * len(ends) for starts, ends in pairwise(bands))


def best_cuts_within(problem: Problem, bands: Bands, *, below: float = inf) -> Partition:
    """The best partition with every cut in its band and all stages faster than `below`; nothing if none is.

    Of equally fast ones it is the first in which the last stages start late.
    """
    reached: dict[int, tuple[float, Cuts]] = {0: (-inf, (0,))}
    for stage in range(problem.stages):
        rest = range(stage + 1, problem.stages)
        ends = [end for end in bands[stage + 1] if problem.least_of(end, problem.last, rest) < below]
        reached = _extended(problem, reached, ends, stage, below)
    seconds, cuts = reached.get(problem.last, (inf, ()))
    return Partition(seconds, cuts) if cuts else Partition()


def _extended(
    problem: Problem, reached: dict[int, tuple[float, Cuts]], band: Sequence[int], stage: int, below: float
) -> dict[int, tuple[float, Cuts]]:
    """The best ways to each end in the band, one stage more."""
    starts = sorted(reached, reverse=True)
    found: dict[int, tuple[float, Cuts]] = {}
    for end in band:
        best, way = below, None
        for start in starts:
            if start >= end:
                continue
            if problem.least_s(start, end, stage) >= best:
                break  # and so are all that start earlier
            if reached[start][0] >= best:
                continue
            value = max(reached[start][0], problem.at(start, end, stage).seconds)
            if value < best:
                best, way = value, start
        if way is not None:
            found[end] = (best, (*reached[way][1], end))
    return found


def _reach(problem: Problem, start: int, stage: int, below: float) -> int:
    """The last place up to which a stage computes for less than `below` seconds; `start` if none is."""
    ends = range(start + 1, problem.last + 1)
    return start + bisect_left(ends, below, key=lambda end: problem.least_s(start, end, stage))


def _reach_back(problem: Problem, end: int, stage: int, below: float) -> int:
    """The first place from which a stage computes for less than `below` seconds; `end` if none is."""
    return bisect_right(range(end), -below, key=lambda start: -problem.least_s(start, end, stage))
