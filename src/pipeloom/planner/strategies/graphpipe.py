"""graphpipe: stages of a DAG. Towers run side by side, so that the pipeline is shallow and holds little.

Stages are intervals of the op order in which branches stand together (branches.py). The least bottleneck is
found by bisection, the shallowest pipeline under it by labels (search/depth_labels.py), first over a few
places, then around the cuts that were found. A pipeline whose slowest stage takes a bit more but that is
shallower fills and drains faster: some are proposed, and the simulated step decides.

Source: GraphPipe, arXiv 2406.17145, sections 5 and 6: bisection of the bottleneck, dynamic programming from
the sink, fewest micro-batches in flight. The paper cuts along series-parallel terms; here a stage may also
hold a join together with the tail of a branch, without which the join has a device of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from ..search.cut_search import Search
from ..search.depth_labels import DepthLabels, Frontier
from ..search.problem import Cuts
from ..stage_cost.tensors import Array, Indices

PLACES = 128
"""Places of the first search."""

TREATED_PLACES = 48
"""The same where residuals are optimised: each stage is then a search of its own."""

FIRST_ENDS = 16
"""Ends of stages that are weighed together at first."""

REFINED = 2
"""Searches around the cuts that were found."""

TOLERANCE = 2e-3
"""Relative, of the bottleneck."""

ABOVE = (TOLERANCE, 0.01, 0.05, 0.2, 0.6, 2.0, 8.0)
"""Shares above what no cut can do without at which the first cuts are sought."""

RELAXED = (1.0, 1.02, 1.05, 1.1, 1.25)
"""Bottlenecks, as shares of the least, under which the shallowest pipeline is looked for."""


def shallow_cuts(search: Search) -> Iterator[Cuts]:
    """Cuts worth a simulation, none twice: the shallowest pipeline for each relaxed bottleneck. Nothing if no
    cut keeps the caps by estimate."""
    best: Cuts = ()
    least = inf
    readers, points = search.model.readers, first_points(search)
    for turn in range(REFINED + 1):
        times = TreatedTimes(search, points) if search.optimises else KeptTimes(search, points)
        edges = {(own, other) for _, own, others in readers.between(points) for other in others}
        labels = DepthLabels(times, Frontier(times.pieces, edges))
        places, slowest = _least_bottleneck(labels, times, least)
        if places:
            least, best = slowest, tuple(int(points[place]) for place in places)
        elif not best:
            return
        if turn == REFINED or len(points) == len(search.model.cut_points):
            break
        points = points_around(search, best, turn)
    proposed = dict.fromkeys([best])
    for share in RELAXED:
        if places := labels.shallowest(least * share):
            proposed[tuple(int(points[place]) for place in places)] = None
    yield from proposed


def _least_bottleneck(labels: DepthLabels, times: IntervalTimes, below: float) -> tuple[Cuts, float]:
    """Places with the least time of the slowest stage, and that time; () if nothing is as fast as `below`."""
    longest = max(times.least_s(piece, piece + 1) for piece in range(times.pieces))
    low, high = max(longest, times.least_s(0, times.pieces) / times.stages), min(below, times.longest_s)
    best: Cuts = ()
    # Upwards from perfect division or the longest piece: the longer stages may be, the more labels there are.
    for slowest in (*(limit for share in ABOVE if (limit := low * (1 + share)) < high), high):
        if best := labels.shallowest(slowest):
            break
        low = slowest
    if not best:
        return (), inf
    # Bisection: something fits in `slowest`, nothing in `low`, unless `low` is still the first bound.
    while slowest > low * (1 + TOLERANCE):
        middle = (low + slowest) / 2
        if places := labels.shallowest(middle):
            best, slowest = places, middle
        else:
            low = middle
    return best, slowest


def first_points(search: Search) -> Indices:
    """Positions over the whole op order: in stretches of equal compute the one that least bytes cross, and
    where branches begin and end."""
    count = max(TREATED_PLACES if search.optimises else PLACES, 4 * len(search.caps))
    return _with_borders(search, _quietest(search, 0, len(search.model), count))


def points_around(search: Search, cuts: Cuts, turn: int) -> Indices:
    """Positions near the cuts, closer with each turn."""
    total = TREATED_PLACES if search.optimises else PLACES
    each = max(6, total // len(cuts))
    near = []
    reach = 1.0 / 4**turn
    for before, cut, after in zip(cuts, cuts[1:], cuts[2:], strict=False):
        left, right = (int(cut + reach * (to - cut) / 2) for to in (before, after))
        near.append(_quietest(search, left, right, each))
    return _with_borders(search, np.unique(np.concatenate([np.array(cuts), *near])))


def _with_borders(search: Search, points: Indices) -> Indices:
    ends = np.array([0, *search.borders, len(search.model)])
    return np.intersect1d(search.model.cut_points, np.union1d(points, ends))


def _quietest(search: Search, start: int, end: int, count: int) -> Indices:
    """Between two positions, in each of `count` stretches of equal compute, where least bytes cross."""
    model = search.model
    allowed = model.cut_points[(model.cut_points > start) & (model.cut_points < end)]
    if len(allowed) <= count:
        return allowed
    prefix, crossing = model.tables.prefix_s[0], model.tables.crossing_bytes
    edges = np.linspace(prefix[start], prefix[end], count + 1)[1:-1]
    groups = np.split(allowed, np.searchsorted(prefix[allowed], edges))
    return np.array([group[np.argmin(crossing[group])] for group in groups if len(group)], dtype=np.int64)


class IntervalTimes:
    """Stages between points, by the compute of their ops: see `DepthLabels`."""

    def __init__(self, search: Search, points: Indices) -> None:
        self.search, self.points = search, points.tolist()
        self.stages, self.pieces = len(search.caps), len(points) - 1
        self._prefix = search.model.tables.prefix_s.min(axis=0)[points].tolist()

    @property
    def longest_s(self) -> float:
        """Seconds that no stage takes longer than: all compute, and every message to and from one stage."""
        model, stages = self.search.model, np.arange(self.stages)
        rough, seconds = model.row(0, np.array([len(model)]), exact=False)
        values = (v for v in model.graph.value.values() if model.readers.produced_at(v.name) >= 0)
        most = np.array([float(sum(value.bytes for value in values))])
        footprint = replace(rough, received=most, received_grads=most)
        whole = model.turns(footprint, seconds, stages).max()
        return float(whole + model.edges(footprint, stages).max())

    def least_s(self, start: int, end: int) -> float:
        return float(self._prefix[end] - self._prefix[start])

    def seconds(self, start: int, end: int, stage: int, depth: int) -> float:
        raise NotImplementedError

    def in_flight(self, depth: int) -> int:
        """Micro-batches that a stage so deep holds: as many as one so far from the end of a chain."""
        return self.search.in_flight[self.stages - depth]


class TreatedTimes(IntervalTimes):
    """With memory optimisation: each stage is asked for when it is needed."""

    @cached_property
    def _at_depth(self) -> list[Search]:
        counts = range(1, self.stages + 1)
        return [replace(self.search, in_flight=(self.in_flight(depth),) * self.stages) for depth in counts]

    def seconds(self, start: int, end: int, stage: int, depth: int) -> float:
        return self._at_depth[depth - 1].evaluate(self.points[start], self.points[end], stage).seconds


class KeptTimes(IntervalTimes):
    """With every residual kept: the shortest stages that begin at a point are weighed together, at all
    depths, and four times as many when a longer one is asked for."""

    def __init__(self, search: Search, points: Indices) -> None:
        super().__init__(search, points)
        self._rows: dict[int, _Row] = {}

    def seconds(self, start: int, end: int, stage: int, depth: int) -> float:
        row = self._rows.get(start)
        index = end - start - 1
        if row is None or index >= row.ends:
            row = self._rows[start] = self._row(
                start, max(FIRST_ENDS, end - start, 4 * row.ends if row else 0)
            )
        return row.turns[stage][index] if depth <= row.deepest[stage][index] else inf

    def _row(self, start: int, count: int) -> _Row:
        search, model = self.search, self.search.model
        ends = np.array(self.points[start + 1 :][:count])
        rough, seconds = model.row(self.points[start], ends, exact=False)
        counts = np.array([self.in_flight(depth) for depth in range(1, self.stages + 1)])
        peaks = model.peaks(rough, counts)
        caps = np.array(search.caps)
        close = (peaks > caps.min()).any(axis=0)
        if close.any():
            exact, _ = model.row(self.points[start], ends[close])
            peaks[:, close] = model.peaks(exact, counts)
        # The product is 1 as long as all depths so far fit: its sum is how many do, the deepest that fits.
        deepest = {cap: (peaks <= cap).cumprod(axis=0).sum(axis=0).tolist() for cap in set(search.caps)}
        turns: Array = model.turns(rough, seconds, np.arange(self.stages))
        return _Row(len(ends), turns.tolist(), [deepest[cap] for cap in search.caps])


class _Row(NamedTuple):
    """The stages from one point to each of the next `ends`: of each rank the seconds, and the greatest depth
    at which they fit, 0 for none."""

    ends: int
    turns: list[list[float]]
    deepest: list[list[int]]
