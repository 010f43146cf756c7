"""Cuts of an op order into stages of a DAG, by labels: for a bottleneck t, the shallowest pipeline.

A stage holds as many micro-batches as it is deep: 1 at the end, else 1 more than the deepest stage that reads
from it. Two towers of two stages and a join, branch by branch:

    a1 a1 a1 | a2 a2 a2 | b1 b1 b1 | b2 b2 b2 join         depth of a1, a2, b1, b2+join   3 2 2 1
                                                           of the same cuts as a chain    4 3 2 1

Labels go from right to left over the places where cuts may be. A label at place s says of all behind s:

    (stages used, depth of the deepest stage that reads each piece in front of s, deepest stage of all)

A piece is what lies between two places. Pieces in front of s that are read by the same pieces behind it have
the same depth there and share a number, so that a few suffice: one for the branch that is being cut, one for
each join and each fork that is open. Stage [s, e) may stand in front of a label at e if it takes at most t
and fits with the micro-batches that its depth asks for. Of labels with as many stages those stay that no
other one is at most as deep as everywhere.

No depth is lost by that: depths in front only grow with those behind, and what fits at some depth fits at a
smaller one. So a label that is covered ends no shallower than the one that covers it.

Time: O(places x places in the longest stage x labels). Nothing is assumed of the graph: in a chain every
place has one label per number of stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import le
from typing import NamedTuple, Protocol, TypeAlias

from .problem import Cuts

MOST_LABELS = 32
"""Labels of one place and one number of stages; the deepest are dropped first. Beyond it the search is a
heuristic."""


class DepthLabel(NamedTuple):
    """What a cut of all behind some place amounts to.

    depths: of each class of pieces in front (see `Frontier`) the depth of the deepest stage that reads it.
    deepest: of all stages.  total: of all depths.  cuts: places, ascending, from this one to the last.
    """

    depths: Depths
    deepest: int
    total: int
    cuts: Cuts

    def covers(self, other: DepthLabel) -> bool:
        """Whether it is nowhere deeper."""
        return self.deepest <= other.deepest and (
            self.depths == other.depths or all(map(le, self.depths, other.depths))
        )


class StageTimes(Protocol):
    """Stages by their places.

    stages: how many there are to be, stage s on rank s.  pieces: between places 0 and `pieces`.
    """

    stages: int
    pieces: int

    def least_s(self, start: int, end: int) -> float:
        """Seconds of compute on the fastest device: never more than `seconds`, growing with the interval."""

    def seconds(self, start: int, end: int, stage: int, depth: int) -> float:
        """Seconds per micro-batch of a stage that is so deep; inf if it does not fit."""


class Frontier:
    """Which pieces in front of a place are read behind it, in classes that the same pieces read.

    edges: (piece, piece that reads it), each from the left to the right.
    """

    def __init__(self, pieces: int, edges: set[tuple[int, int]]) -> None:
        readers: list[list[int]] = [[] for _ in range(pieces)]
        for source, target in sorted(edges):
            readers[source].append(target)
        self._readers = [tuple(row) for row in readers]
        self._classes = [self._at(place) for place in range(pieces + 1)]

    def _at(self, place: int) -> tuple[list[tuple[int, ...]], dict[int, int]]:
        """The classes at a place, by the pieces that read them, and the class of each piece in front."""
        number: dict[tuple[int, ...], int] = {}
        class_of: dict[int, int] = {}
        for piece, readers in enumerate(self._readers[:place]):
            if rest := readers[bisect_left(readers, place) :]:  # those behind the place
                class_of[piece] = number.setdefault(rest, len(number))
        return list(number), class_of

    def crossing(self, start: int, end: int) -> LabelCrossing:
        """What a stage between two places does to the classes."""
        behind, class_of = self._classes[end]
        own = {class_of[piece] for piece in range(start, end) if piece in class_of}
        number = {readers: index for index, readers in enumerate(behind)}
        passed = []
        for readers in self._classes[start][0]:
            rest = readers[bisect_left(readers, end) :]
            passed.append((readers[0] < end, number[rest] if rest else -1))
        return LabelCrossing(tuple(sorted(own)), tuple(passed))


Depths: TypeAlias = tuple[int, ...]
"""Of each class of pieces the depth of the deepest stage that reads it."""


class LabelCrossing:
    """What a stage makes of the labels behind it.

    own: classes behind a stage that it writes.  passed: of each class in front of it whether it reads it,
    and the same pieces' class behind it, -1 for none.
    """

    def __init__(self, own: tuple[int, ...], passed: tuple[tuple[bool, int], ...]) -> None:
        self._own, self._passed = own, passed
        self._known: dict[Depths, tuple[int, Depths]] = {}

    def of(self, depths: Depths) -> tuple[int, Depths]:
        """The depth of the stage in front of a label with these depths, and the depths of the label that it
        makes of it. Most are asked for again: with other numbers of stages, and for other bottlenecks."""
        if (known := self._known.get(depths)) is None:
            depth = 1 + max((depths[index] for index in self._own), default=0)
            made = tuple(
                max(depth if reads else 0, depths[index] if index >= 0 else 0)
                for reads, index in self._passed
            )
            known = self._known[depths] = depth, made
        return known


class DepthLabels:
    """The labels of one problem, for any bottleneck."""

    def __init__(self, times: StageTimes, frontier: Frontier) -> None:
        self._times = times
        self._frontier = frontier
        self._crossings: dict[tuple[int, int], LabelCrossing] = {}
        self._found: dict[float, Cuts] = {}

    def shallowest(self, bottleneck_s: float) -> Cuts:
        """Places of the cuts, both ends included, of the shallowest pipeline whose stages all fit and take at
        most so long; () if there is none. Of equally shallow ones that of the least sum of depths, of those
        that are left: labels cover each other whatever their sums."""
        if bottleneck_s not in self._found:
            self._found[bottleneck_s] = self._shallowest(bottleneck_s)
        return self._found[bottleneck_s]

    def _shallowest(self, bottleneck_s: float) -> Cuts:
        times, pieces, stages = self._times, self._times.pieces, self._times.stages
        limit = bottleneck_s * (1 + 1e-9)
        labels: list[list[list[DepthLabel]]] = [[[] for _ in range(stages + 1)] for _ in range(pieces + 1)]
        labels[pieces][0].append(DepthLabel((), 0, 0, (pieces,)))
        for start in range(pieces - 1, -1, -1):
            in_front = times.least_s(0, start)
            for end in range(start + 1, pieces + 1):
                if times.least_s(start, end) > limit:
                    break
                for used, here in enumerate(labels[end][:stages]):
                    # What stands in front needs a piece for each stage that is left, takes at most the limit
                    # in each, and is empty when none is left.
                    left = stages - used - 1
                    enough = left <= start and in_front <= limit * left
                    if here and enough and (left > 0) == (start > 0):
                        self._extend(here, labels[start][used + 1], (start, end), left, limit)
        complete = labels[0][stages]
        return min(complete, key=lambda label: (label.deepest, label.total)).cuts if complete else ()

    def _extend(
        self,
        behind: Sequence[DepthLabel],
        kept: list[DepthLabel],
        interval: tuple[int, int],
        stage: int,
        limit: float,
    ) -> None:
        """Put a stage in front of labels, and keep what no label covers."""
        crossing = self._crossings.get(interval)
        if crossing is None:
            crossing = self._crossings[interval] = self._frontier.crossing(*interval)
        start, end = interval
        for label in behind:
            depth, depths = crossing.of(label.depths)
            if self._times.seconds(start, end, stage, depth) > limit:
                continue
            deepest = max(label.deepest, depth)
            found = DepthLabel(depths, deepest, label.total + depth, (start, *label.cuts))
            if any(other.covers(found) for other in kept):
                continue
            kept[:] = [other for other in kept if not found.covers(other)]
            kept.append(found)
        if len(kept) > MOST_LABELS:
            kept.sort(key=lambda label: (label.deepest, sum(label.depths)))
            del kept[MOST_LABELS:]
