"""The dynamic programme over contiguous cuts that every exact search here is.

    best[s + 1][j] = min over i < j of  combine(best[s][i], value_s(i, j))

with value_s(i, j) = inf where stage s may not be ops i..j-1. Starts are visited in ascending order: when i
comes, best[s][i] is final for every s, so each row of values is made once and used for all stages.

    best[s][j]   j = 0   1   2   3   4   5
    s = 0            x                          start i = 2: column 2 is final. One row of values, those of
        1                x   x   x   x   x      [2, 3), [2, 4), [2, 5), improves the columns behind it:
        2                    x  (x) (x) (x)     best[2] with best[1][2],
        3                       (x) (x) (x)     best[3] with best[2][2], in one numpy call

Time: places^2 x stages.

`combine` must not shrink: a maximum, or a sum of what is not below 0. Then the best of the whole has the best
in front of each cut, and what is above `below` once stays above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ir.memory_policy import Treatment
from ..stage_cost.model import CostModel
from ..stage_cost.peak_memory import Footprint
from ..stage_cost.tensors import Array, Indices
from ..treatments.choose import Evaluation, Evaluator, Known, choose_by_layers, treat_interval
from ..treatments.greedy import choose_greedily
from .problem import Problem

Row = Callable[[int, Indices, Indices], Array]
"""(start, ends, ranks) -> values of the intervals [start, end) on those ranks: (ranks, ends)."""

Evaluate = Callable[[int, Indices, Indices, Footprint[Array], Array], Array]
"""The same from the intervals' rough footprints and their compute times."""

FIRST_PIECE = 128
"""Ops of the longest interval that is looked at before longer ones are."""

NOTHING: tuple[float, tuple[int, ...]] = (float("inf"), ())


def best_cuts(
    points: Indices,
    stages: int,
    row: Row,
    combine: Callable[[Any, Any], Any] = np.maximum,
    *,
    stop: Callable[[int], int] | None = None,
    below: float = np.inf,
) -> tuple[float, tuple[int, ...]]:
    """The best cut of ops 0..n-1 into non-empty intervals.

    points: where cuts may be, ascending, from 0 to n.
    stop: start -> end of the longest interval worth a look.  below: results above this are dropped.
    Returns (value, cuts) with stages + 1 cut positions; (inf, ()) if nothing is allowed.
    """
    ops = int(points[-1])
    best = np.full((stages + 1, ops + 1), np.inf)
    best[0, 0] = -np.inf if combine is np.maximum else 0.0
    origin = np.zeros((stages + 1, ops + 1), dtype=np.int64)
    for index, start in enumerate(points[:-1]):
        ranks = np.nonzero((best[:-1, start] < np.inf) & (best[:-1, start] <= below))[0]
        if not len(ranks):
            continue
        last = len(points) if stop is None else np.searchsorted(points, stop(start), side="right")
        ends = points[index + 1 : max(last, index + 2)]
        if ranks[0] == stages - 1:  # the last stage takes the rest
            if ends[-1] < ops:
                continue
            ends = ends[-1:]
        values = combine(best[ranks, start][:, None], row(int(start), ends, ranks))
        cells = np.ix_(ranks + 1, ends)  # the rectangle of these rows and columns
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
    coarse: with more ops than this, searches over fewer cut positions bound the full one.
    treatments: what may be done with residuals besides keeping them.
    watch: told how many stages were weighed so far.
    layers: op -> number of the layer whose residuals are all treated alike; empty: each by itself.
    known: evaluations, shared by the searches that `replace` makes of one, of the same model.
    borders: positions in the op order where a branch begins or ends (see planner/branches.py).
    by_depth: `in_flight` is that of a chain, and a stage of another graph holds as many micro-batches as the
        stage of the chain that is as far from the end; if not, it holds those of its place in the op order.
    """

    model: CostModel
    caps: tuple[int, ...]
    in_flight: tuple[int, ...]
    coarse: int = 400
    treatments: tuple[Treatment, ...] = ()
    watch: Callable[[int], None] | None = None
    layers: Mapping[str, int] = field(default_factory=dict)
    known: Known = field(default_factory=dict, compare=False, repr=False)
    borders: tuple[int, ...] = ()
    by_depth: bool = False

    @cached_property
    def evaluate(self) -> Evaluator:
        """What planners ask of an interval of ops."""
        return self._weighing(ahead=False, watch=self.watch)

    @cached_property
    def ahead(self) -> Evaluator:
        """The same of stages that recompute in front of their backward."""
        return self._weighing(ahead=True)

    def _weighing(self, *, ahead: bool, watch: Callable[[int], None] | None = None) -> Evaluator:
        """Evaluations are remembered; those of stages with the same cap, micro-batches in flight and ways to
        free memory are shared with the searches that this one was made of."""
        layers = [self.layers.get(op.name, -1) for op in self.model.readers.ops] if self.layers else []
        solve = choose_by_layers(layers) if layers else choose_greedily
        how = ahead, self.treatments, tuple(self.layers.items())
        limits = enumerate(zip(self.caps, self.in_flight, strict=True))
        known_of = [self.known.setdefault((stage, *limit, *how), {}) for stage, limit in limits]

        def evaluate(start: int, end: int, stage: int) -> Evaluation:
            known = known_of[stage]
            if (start, end) not in known:
                known[start, end] = treat_interval(
                    self.model,
                    start,
                    end,
                    stage,
                    in_flight=self.in_flight[stage],
                    cap=self.caps[stage],
                    treatments=self.treatments,
                    solve=solve,
                    ahead=ahead,
                )
                if watch is not None:
                    watch(sum(map(len, self.known.values())))
            return known[start, end]

        return evaluate

    @property
    def optimises(self) -> bool:
        """Whether residuals may be recomputed or offloaded."""
        return bool(self.treatments)

    @property
    def tolerance(self) -> float:
        """Relative difference of stage times that searches of large graphs neglect."""
        return 1e-3 if self.large else 1e-9

    @cached_property
    def problem(self) -> Problem:
        """What planners that search by places see."""
        prefix, crossing = self.model.tables.prefix_s[self.model.kind], self.model.tables.crossing_bytes
        everyone, caps = np.array(self.in_flight), np.array(self.caps, dtype=np.float64)

        @cache  # half of what is asked is asked again
        def shares(start: int, end: int) -> Sequence[float]:
            rough, _ = self.model.row(start, np.array([end]), exact=False)
            return list(self.model.peaks(rough, everyone)[:, 0] / caps)

        return Problem(
            points=self.model.cut_points.tolist(),
            stages=len(self.caps),
            caps=self.caps,
            evaluate=self.evaluate,
            compute_s=lambda start, end, s: float(prefix[s, end] - prefix[s, start]),
            shares=shares,
            crossing=lambda position: float(crossing[position]),
        )

    @property
    def slowest_link(self) -> float:
        """Bytes per second of the slowest link between neighbours; inf for one stage."""
        ranks = range(len(self.caps) - 1)
        return min((self.model.cluster.link(r, r + 1).bandwidth_bytes_per_s for r in ranks), default=np.inf)

    def fastest_of_few(self) -> tuple[int, ...]:
        """The cut whose slowest stage is fastest among those at `coarse` positions; () if none fits."""
        levels = self._levels()
        return self._refine(levels[:-1] or levels, self._fastest)[1]

    def fastest(self) -> tuple[float, tuple[int, ...]]:
        """The cut whose slowest stage is fastest among those that fit, and that stage's seconds.

        Of equally fast ones it is one with the least time in transfers. (inf, ()) if none fits.
        """
        value, cuts = self._refine(self._levels(), self._fastest)
        if not cuts:
            return NOTHING
        limit = value * (1 + 1e-9)
        row = self._in_pieces(lambda *at: self._traffic(limit, *at), 1.0)
        _, calm = best_cuts(
            self.model.cut_points, len(self.caps), row, np.add, stop=lambda start: self._reach(start, limit)
        )
        return value, calm or cuts

    def smallest(self) -> tuple[float, tuple[int, ...]]:
        """The cut that fills the fullest rank least, and the share of its cap that it fills.

        For a graph with many positions, cuts at a quarter of `coarse` only: then a little less may do.
        """
        everywhere = self.model.cut_points
        few = [self._points(self.coarse // 16), self._points(self.coarse // 4)]
        many = len(everywhere) > self.coarse and len(few[1]) > len(self.caps)
        return self._refine(few if many else [few[1], everywhere], self._smallest)

    @property
    def large(self) -> bool:
        return len(self.model) > self.coarse

    @cached_property
    def places(self) -> Indices:
        """Positions among which cuts are moved: of a large graph `coarse` of them."""
        return self._points(self.coarse) if self.large else self.model.cut_points

    def _levels(self) -> list[Indices]:
        """Cut positions of one search after another, each within the bound of the one before."""
        everywhere = self.model.cut_points
        few = [self._points(self.coarse // 8), self._points(self.coarse)] if self.large else []
        return [*few, everywhere]

    def _refine(
        self, levels: list[Indices], search: Callable[[float, Indices], tuple[float, tuple[int, ...]]]
    ) -> tuple[float, tuple[int, ...]]:
        value, cuts = NOTHING
        for points in levels:
            better, found = search(value, points)
            value, cuts = (better, found) if found else (value, cuts)
        return value, cuts

    def _points(self, count: int) -> Indices:
        """In each of `count` stretches of the op order the cut that least bytes cross; both ends; and
        enough cuts for the stages there are."""
        ops = len(self.model)
        everywhere = self.model.cut_points
        crossing = np.full(ops + 1, np.inf)
        crossing[everywhere] = self.model.tables.crossing_bytes[everywhere]
        edges = np.linspace(1, ops, min(max(count, 4 * len(self.caps)), ops), dtype=np.int64)
        stretches = zip(edges[:-1], edges[1:], strict=True)
        inner = [a + int(np.argmin(crossing[a:b])) for a, b in stretches if a < b]
        return np.intersect1d(everywhere, np.array([0, ops, *inner], dtype=np.int64))

    def _fastest(self, bound: float, points: Indices) -> tuple[float, tuple[int, ...]]:
        stop = None if bound == np.inf else (lambda start: self._reach(start, bound))
        return best_cuts(points, len(self.caps), self._in_pieces(self._turns, 1.0), stop=stop, below=bound)

    def _smallest(self, bound: float, points: Indices) -> tuple[float, tuple[int, ...]]:
        row = self._in_pieces(lambda *at: self._shares(bound, *at), bound)
        return best_cuts(points, len(self.caps), row, below=bound)

    def _reach(self, start: int, bound: float) -> int:
        """The end of the longest interval from `start` that some rank computes within `bound` seconds."""
        limits = self.model.tables.prefix_s[:, start] + bound * (1 + 1e-9)
        rows = zip(self.model.tables.prefix_s, limits, strict=True)
        return max(int(np.searchsorted(prefix, limit, side="right")) - 1 for prefix, limit in rows)

    def _in_pieces(self, evaluate: Evaluate, limit: float) -> Row:
        """A row made piece by piece, each longer than the last, until not even what only grows with the
        interval (parameters, residuals) leaves a rank below `limit` of its cap."""

        def row(start: int, ends: Indices, ranks: Indices) -> Array:
            values = np.full((len(ranks), len(ends)), np.inf)
            done, length = 0, FIRST_PIECE
            while done < len(ends):
                upto = max(int(np.searchsorted(ends, start + length, side="right")), done + 1)
                rough, seconds = self.model.row(start, ends[done:upto], exact=False)
                values[:, done:upto] = evaluate(start, ends[done:upto], ranks, rough, seconds)
                none_fits = not np.isfinite(values[:, upto - 1]).any()
                if none_fits and self._filled(growing_part(rough), ranks)[:, -1].min() > limit:
                    break
                done, length = upto, 4 * length
            return values

        return row

    def _filled(self, footprint: Footprint[Array], ranks: Indices) -> Array:
        in_flight, caps = np.array(self.in_flight)[ranks], np.array(self.caps, dtype=np.float64)[ranks]
        return np.asarray(self.model.peaks(footprint, in_flight) / caps[:, None])

    def _fits(self, start: int, ends: Indices, ranks: Indices, rough: Footprint[Array]) -> NDArray[np.bool_]:
        """Which intervals fit; the exact transient memory is worked out only where it decides."""
        fits = self._filled(rough, ranks) <= 1
        if fits.all():
            return np.asarray(fits)
        least = self._filled(without_transient(rough), ranks) <= 1
        # `rough` is an upper bound, as far as `LivenessSweep.bounds` is, and `least` a lower one: a sweep is
        # needed only where they disagree.
        open_ends = np.nonzero((least & ~fits).any(axis=0))[0]
        if len(open_ends):
            exact, _ = self.model.row(start, ends[open_ends])
            fits[:, open_ends] = self._filled(exact, ranks) <= 1
        return np.asarray(fits)

    def _turns(
        self, start: int, ends: Indices, ranks: Indices, rough: Footprint[Array], seconds: Array
    ) -> Array:
        fits = self._fits(start, ends, ranks, rough)
        return np.where(fits, self.model.turns(rough, seconds, ranks), np.inf)

    def _traffic(
        self, limit: float, start: int, ends: Indices, ranks: Indices, rough: Footprint[Array], seconds: Array
    ) -> Array:
        allowed = self.model.turns(rough, seconds, ranks) <= limit
        allowed &= self._fits(start, ends, ranks, rough)
        return np.where(allowed, self.model.edges(rough, ranks), np.inf)

    def _shares(
        self, bound: float, start: int, ends: Indices, ranks: Indices, rough: Footprint[Array], seconds: Array
    ) -> Array:
        least = self._filled(without_transient(rough), ranks)
        shares = np.full(least.shape, np.inf)
        open_ends = np.nonzero((least <= bound).any(axis=0))[0]
        if len(open_ends):
            shares[:, open_ends] = self._filled(self.model.row(start, ends[open_ends])[0], ranks)
        return shares


def without_transient(f: Footprint[Any]) -> Footprint[Any]:
    return replace(f, forward_transient=0.0, backward_transient=0.0)


def growing_part(f: Footprint[Any]) -> Footprint[Any]:
    """What an interval can only have more of when it gets longer."""
    return replace(without_transient(f), received=0.0, received_grads=0.0, sent=0.0, sent_grads=0.0)
