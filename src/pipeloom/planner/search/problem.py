"""Problem: what the planners that search see. No graph, only places where cuts may be and what lies between.

Places count the positions in which a cut is allowed, both ends of the op order included: place 0 is in front
of the first op, the last one behind the last op. Stage s runs what lies between the places cuts[s] and
cuts[s + 1].

The dynamic programme over places asks for one interval after another, each cut within a band:

    best[s + 1][j] = min over i < j of  max(best[s][i], F_s(i, j))

Intervals whose compute alone is too long are never evaluated, nor ends that leave too much for the stages
that follow. With bands as wide as the problem the result is exact, whatever the times are like.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from ..treatments.choose import Evaluation, Evaluator

Cuts = tuple[int, ...]

Key = tuple[float, float]
"""(share of its cap that a stage needs at least, 0 if it fits; its seconds): less is better."""


@dataclass(frozen=True)
class Partition:
    """What a search found: places of the cuts, both ends included, and the seconds of the slowest stage.

    Nothing found: no cuts, infinite seconds.
    """

    seconds: float = inf
    cuts: Cuts = ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Cut the ops between `points[0]` and `points[-1]` into `stages` non-empty intervals.

    points: positions in the op order, ascending.
    evaluate: (start, end, stage) -> what these ops cost as that stage; start and end are positions.
    compute_s: the same -> seconds of compute alone, never more than `evaluate` says, growing with the
        interval.
    caps: bytes per stage.
    shares: (start, end) -> for each stage the share of its cap that these ops fill with every residual kept.
    crossing: position -> bytes of the values that cross a cut there.
    """

    points: Sequence[int]
    stages: int
    caps: Sequence[float]
    evaluate: Evaluator
    compute_s: Callable[[int, int, int], float]
    shares: Callable[[int, int], Sequence[float]]
    crossing: Callable[[int], float] = lambda position: 0.0

    @property
    def last(self) -> int:
        """The last place; there are as many pieces to assign."""
        return len(self.points) - 1

    def at(self, start: int, end: int, stage: int) -> Evaluation:
        """The evaluation of a stage between two places."""
        return self.evaluate(self.points[start], self.points[end], stage)

    def key(self, start: int, end: int, stage: int) -> Key:
        """By which stages are compared, those that do not fit included."""
        found = self.at(start, end, stage)
        return (0.0 if found.fits else found.peak_bytes / self.caps[stage], found.seconds)

    def least_s(self, start: int, end: int, stage: int) -> float:
        """Seconds of compute between two places."""
        return self.compute_s(self.points[start], self.points[end], stage)

    def least_of(self, start: int, end: int, stages: Sequence[int]) -> float:
        """Seconds that no partition among some stages beats: the compute between, divided perfectly."""
        if start >= end or not stages:
            return 0.0
        times = [self.least_s(start, end, s) for s in stages]
        return 1 / sum(1 / t for t in times) if all(t > 0 for t in times) else 0.0

    def filled(self, start: int, end: int) -> Sequence[float]:
        """Of each stage's cap the share that all between two places fills with every residual kept."""
        return self.shares(self.points[start], self.points[end])

    def part(self, first: int, last: int, stages: range) -> Problem:
        """The problem of cutting what lies between two places into some of the stages."""
        begin, end = stages.start, stages.stop
        return replace(
            self,
            points=self.points[first : last + 1],
            stages=len(stages),
            caps=self.caps[begin:end],
            evaluate=lambda start, stop, stage: self.evaluate(start, stop, stage + begin),
            compute_s=lambda start, stop, stage: self.compute_s(start, stop, stage + begin),
            shares=lambda start, stop: self.shares(start, stop)[begin:end],
        )

    def weigh(self, cuts: Cuts) -> Partition:
        """A partition by its cuts; nothing if one of its stages does not fit."""
        bounds = zip(cuts, cuts[1:], strict=False)
        seconds = max(self.at(a, b, s).seconds for s, (a, b) in enumerate(bounds))
        return Partition(seconds, cuts) if seconds < inf else Partition()

    def positions(self, cuts: Cuts) -> Cuts:
        """Places as positions in the op order."""
        return tuple(int(self.points[place]) for place in cuts)


def largest(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The largest number of (low, high] that is good, `low` if none is; for what is good up to some number.

    `high` is tried first, then numbers divisible by high powers of two: searches over ranges that differ
    a little then ask for the same numbers, which memoised answers make fast.

    >>> largest(0, 100, lambda n: n <= 37)
    37
    """
    if high <= low or good(high):
        return max(low, high)
    while high - low > 1:
        middle = _roundest(low, high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _roundest(low: int, high: int) -> int:
    """Of the middle half of (low, high) the number divisible by the highest power of two.

    >>> _roundest(0, 100), _roundest(5, 7)
    (64, 6)
    """
    quarter = (high - low) // 4
    first, final = max(low + 1, low + quarter), min(high - 1, high - quarter)
    step = 1 << max(0, (final - first).bit_length())
    while -(-first // step) * step > final:
        step //= 2
    return -(-first // step) * step


Bands = Sequence[Sequence[int]]
"""For each cut, both ends included, the places where it may be, ascending."""


def all_bands(problem: Problem) -> Bands:
    """All places: the search is then exact, whatever the times are like."""
    last, stages = problem.last, problem.stages
    inner = [range(s, last - (stages - s) + 1) for s in range(1, stages)]
    return [(0,), *inner, (last,)]


def bands_around(problem: Problem, cuts: Cuts, width: int) -> Bands:
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
