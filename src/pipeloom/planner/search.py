"""The dynamic programme over contiguous cuts that every exact search here is.

    best[s + 1][j] = min over i < j of  combine(best[s][i], value_s(i, j))

with value_s(i, j) = inf where stage s may not be ops i..j-1. Starts are visited in ascending order: when i
comes, best[s][i] is final for every s, so each row of values is made once and used for all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cost import CostModel, Footprint
from .intervals import Array, Indices

Row = Callable[[int, Indices, Indices], Array]
"""(start, ends, ranks) -> values of the intervals [start, end) on those ranks: (ranks, ends)."""

NOTHING: tuple[float, tuple[int, ...]] = (float("inf"), ())


def sweep(
    ops: int, stages: int, row: Row, combine: Callable[[Any, Any], Any] = np.maximum, *,
    points: Indices | None = None, stop: Callable[[int], int] | None = None, below: float = np.inf,
) -> tuple[float, tuple[int, ...]]:  # fmt: skip
    """The best cut of ops 0..ops-1 into non-empty intervals.

    points: where cuts may be, ascending, 0 and `ops` included (default: everywhere).
    stop: start -> end of the longest interval worth a look.  below: results above this are dropped.
    Returns (value, cuts) with stages + 1 cut positions; (inf, ()) if nothing is allowed.
    """
    best = np.full((stages + 1, ops + 1), np.inf)
    best[0, 0] = -np.inf if combine is np.maximum else 0.0
    origin = np.zeros((stages + 1, ops + 1), dtype=np.int64)
    allowed = np.arange(ops + 1) if points is None else points
    for index, start in enumerate(allowed[:-1]):
        ranks = np.nonzero((best[:-1, start] < np.inf) & (best[:-1, start] <= below))[0]
        if not len(ranks):
            continue
        last = len(allowed) if stop is None else np.searchsorted(allowed, stop(start), side="right")
        ends = allowed[index + 1 : max(last, index + 2)]
        values = combine(best[ranks, start][:, None], row(int(start), ends, ranks))
        cells = np.ix_(ranks + 1, ends)
        better = values < best[cells]
        best[cells] = np.where(better, values, best[cells])
        origin[cells] = np.where(better, start, origin[cells])
    if not best[stages, ops] <= below or best[stages, ops] == np.inf:
        return NOTHING
    cuts = [ops]
    for stage in range(stages, 0, -1):
        cuts.append(int(origin[stage, cuts[-1]]))
    return float(best[stages, ops]), tuple(reversed(cuts))


@dataclass(frozen=True, kw_only=True)
class Search:
    """Contiguous cuts of one graph into stages 0..len(caps)-1, stage s on rank s.

    caps: bytes per rank.  in_flight: micro-batches whose residuals each stage holds at its peak.
    coarse: with more ops than this, a first search over about so many cut positions bounds the full one.
    """

    model: CostModel
    caps: tuple[int, ...]
    in_flight: tuple[int, ...]
    coarse: int = 400

    def fastest(self) -> tuple[float, tuple[int, ...]]:
        """The cut whose slowest stage is fastest among those that fit, and that stage's seconds.

        Of equally fast ones it is one with the least time in transfers. (inf, ()) if none fits.
        """
        bound, cuts = self._fastest(np.inf, self.points()) if self.large else NOTHING
        value, found = self._fastest(bound, None)
        value, cuts = (value, found) if found else (bound, cuts)
        if not cuts:
            return NOTHING
        limit = value * (1 + 1e-9)
        _, calm = sweep(
            len(self.model), len(self.caps), lambda *at: self._traffic(limit, *at), np.add,
            stop=lambda start: self._reach(start, limit),
        )  # fmt: skip
        return value, calm or cuts

    def smallest(self) -> tuple[float, tuple[int, ...]]:
        """The cut that fills the fullest rank least, and the share of its cap that it fills.

        For a large graph, cuts at `points` only: then a little less may do.
        """
        points = self.points() if self.large else None
        return sweep(len(self.model), len(self.caps), self._shares, points=points)

    @property
    def large(self) -> bool:
        return len(self.model) > self.coarse

    def points(self) -> Indices:
        """In each of `coarse` stretches of the op order the cut that least bytes cross; and both ends."""
        ops = len(self.model)
        crossing = self.model.crossing_bytes
        edges = np.linspace(1, ops, min(self.coarse, ops), dtype=np.int64)
        inner = [a + int(np.argmin(crossing[a:b])) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        return np.unique(np.array([0, ops, *inner], dtype=np.int64))

    def _fastest(self, bound: float, points: Indices | None) -> tuple[float, tuple[int, ...]]:
        stop = None if bound == np.inf else (lambda start: self._reach(start, bound))
        return sweep(len(self.model), len(self.caps), self._turns, points=points, stop=stop, below=bound)

    def _reach(self, start: int, bound: float) -> int:
        """The end of the longest interval from `start` that some rank computes within `bound` seconds."""
        limits = self.model.prefix_s[:, start] + bound * (1 + 1e-9)
        rows = zip(self.model.prefix_s, limits, strict=True)
        return max(int(np.searchsorted(prefix, limit, side="right")) - 1 for prefix, limit in rows)

    def _filled(self, footprint: Footprint, ranks: Indices) -> Array:
        """Share of its cap that each interval fills on each rank."""
        in_flight, caps = np.array(self.in_flight)[ranks], np.array(self.caps, dtype=np.float64)[ranks]
        return np.asarray(self.model.memory(footprint, in_flight) / caps[:, None])

    def _shares(self, start: int, ends: Indices, ranks: Indices) -> Array:
        return self._filled(self.model.row(start, ends)[0], ranks)

    def _turns(self, start: int, ends: Indices, ranks: Indices) -> Array:
        footprint, seconds = self.model.row(start, ends)
        times = self.model.turns(footprint, seconds, ranks)
        return np.where(self._filled(footprint, ranks) <= 1, times, np.inf)

    def _traffic(self, limit: float, start: int, ends: Indices, ranks: Indices) -> Array:
        footprint, seconds = self.model.row(start, ends)
        allowed = self.model.turns(footprint, seconds, ranks) <= limit
        allowed &= self._filled(footprint, ranks) <= 1
        return np.where(allowed, self.model.edges(footprint, ranks), np.inf)
