"""Steps of many cuts at once, without a simulation: what says which cuts are worth one.

    ClosedForm   m x the busiest rank + (ranks - 1) x the mean turn, each weighed by itself: of any order
    InOrder      when each action of one order begins, for all cuts at once; stretched if there are fewer
                 micro-batches in it

Cuts are rows of places: numbers of the positions where the op order may be cut. What stages take besides
their ops (clones, what is made again) and what comes before and after the actions is that of a candidate
whose step is known, if one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from math import comb
from typing import NamedTuple, TypeAlias

import numpy as np

from ...ir.columns import B_, F_, I_, W_, Columns, Longs
from ...ir.flow import Flow
from ...ir.kernels import kernel
from ..candidate import Candidate
from ..placement import Layout
from ..search.cut_search import Search
from ..stage_cost.tensors import Array, Indices

STEPS = (-4, -2, -1, 1, 2, 4)
"""Places by which one cut moves."""

BUSIEST, IDLEST = 2, 16
"""Ranks whose stages give time to others, and those whose stages take it."""

NEAR = 0.25
"""Share of the mean stage that a cut is away from a border, at most, to be moved there."""

ACTIONS = 30_000
"""Actions of an order that are gone through for all moves together, for many cuts each."""

ALL_CUTS = 3_000
"""Cuts up to which all are looked at."""

TOGETHER, ENTRIES = 64, 4_000_000
"""Cuts of which the actions' ends are kept at once, so that they stay in a processor's cache; and how many
ends."""

WEIGHED, FEW_PLACES = 24, 16
"""Cuts of a pass that are weighed with what is freed to keep their caps: those that are fastest without, and
all where there are so few places."""

SHARES = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015)
"""Of the mean turn that are moved between two stages."""

PASSES = 60
"""Moves that are made at most."""

LESS = 1 - 1e-6


Estimate: TypeAlias = "ClosedForm | InOrder"
"""What is searched by. steps: the seconds of cuts, given as (cuts, stages + 1) places.  passes: moves that
are made at most."""


class CutTimes:
    """What the stages of cuts take.

    parts: seconds before each place of forwards, of gradients of inputs and of weights, by stage.
    turns_of: (stages, ranks), how many turns of a stage a rank takes in a step.
    """

    def __init__(
        self,
        search: Search,
        layout: Layout,
        microbatches: int,
        *,
        weighed: bool = False,
        also: Sequence[int] = (),
    ) -> None:
        """also: positions to cut at that are no places of the search."""
        model = search.model
        self.search, self.layout, self.microbatches, self.weighed = search, layout, microbatches, weighed
        self.points = np.union1d(search.places, np.array(also, dtype=np.int64)) if also else search.places
        self.stages, self.ranks = layout.stages, layout.ranks
        self.parts = model.tables.prefix_parts_s[:, np.array(model.kind)][:, :, self.points]
        self.whole = self.parts.sum(axis=0)
        self.turns_of = turns_of_ranks(layout.placement, self.stages, microbatches)

    def of(self, places: Indices) -> Array:
        """Seconds of the parts of stages: (3, cuts, stages)."""
        parts, row = self.parts.reshape(3, -1), np.arange(self.stages) * len(self.points)
        return np.asarray(parts.take(row + places[:, 1:], axis=1) - parts.take(row + places[:, :-1], axis=1))

    def besides(self, known: Candidate) -> Array:
        """Seconds that stages of a candidate take besides their ops: (3, stages)."""
        took = [[c.forward_s, c.input_grad_s + c.recompute_s, c.weight_grad_s] for c in known.stage_costs]
        ops = self.of(self.places(known.cuts)[None])[:, 0]
        return np.maximum(0.0, np.array(took)[: self.stages].T - ops)

    def turns(self, places: Indices) -> Array:
        """Seconds of the parts together: (cuts, stages)."""
        row = np.arange(self.stages) * len(self.points)
        return np.asarray(self.whole.take(row + places[:, 1:]) - self.whole.take(row + places[:, :-1]))

    def exposed(self, places: Indices) -> Array:
        """Seconds that a turn takes beyond computing, by the search; inf where a stage does not fit."""
        found = np.zeros((len(places), self.stages))
        known: dict[tuple[int, int, int], float] = {}
        for row, cuts in enumerate(places.tolist()):
            for stage in range(self.stages):
                key = cuts[stage], cuts[stage + 1], stage
                if key not in known:
                    start, end = self.points[[key[0], key[1]]].tolist()
                    compute = self.whole[stage, key[1]] - self.whole[stage, key[0]]
                    known[key] = max(0.0, self.search.evaluate(start, end, stage).seconds - compute)
                found[row, stage] = known[key]
        return found

    def places(self, cuts: Sequence[int]) -> Indices:
        """Those of cuts, or near them: a search of its own may cut where there is no place."""
        return self._ascending(np.searchsorted(self.points, np.array(cuts)))

    def cut(self, places: Indices) -> tuple[int, ...]:
        return tuple(self.points[places].tolist())

    @property
    def possible_cuts(self) -> int:
        """How many there are."""
        return comb(len(self.points) - 2, self.stages - 1)

    def every_cut(self) -> Indices:
        last = len(self.points) - 1
        return np.array([(0, *some, last) for some in combinations(range(1, last), self.stages - 1)])

    @cached_property
    def middle(self) -> Array:
        """Seconds in front of each place, the mean of the ranks'."""
        return np.asarray(self.whole.mean(axis=0))

    def evenly(self, bare: int = 0) -> Indices | None:
        """Places of stages that take equally long; None if there are too few.

        bare: stages in front, or behind if negative, that have one piece each.
        """
        last, middle = len(self.points) - 1, self.middle
        if last < self.stages:
            return None
        front, behind = max(bare, 0), max(-bare, 0)
        inner = self.stages - front - behind
        low, high = middle[front], middle[last - behind]
        wanted = np.searchsorted(middle, low + (high - low) * np.arange(1, inner) / inner)
        return self._ascending(np.array([*range(front + 1), *wanted, *range(last - behind, last + 1)]))

    def _ascending(self, places: Indices) -> Indices:
        """Strictly, with one piece left to each stage behind a place."""
        # Less their numbers places may be equal, so that a running maximum mends them:
        #
        #     places           0 4 4 5 9
        #     less the number  0 3 2 2 5    maximum  0 3 3 3 5    and the number again  0 4 5 6 9
        #
        index = np.arange(len(places))
        spread = np.maximum.accumulate(np.maximum(places, index) - index) + index
        room = len(self.points) - 1 - (self.stages - index)
        return np.asarray(np.minimum(spread, room), dtype=np.int64)

    def at_borders(self, places: Indices) -> Indices:
        """The same with cuts where branches begin or end, if they are near: a stage with parts of two
        branches waits for both."""
        moved, near_s = places.copy(), NEAR * self.middle[-1] / self.stages
        for border in np.flatnonzero(np.isin(self.points, self.search.borders)).tolist():
            away_s = np.abs(self.middle[places] - self.middle[border])
            nearest = int(np.argmin(away_s))
            if away_s[nearest] <= near_s and 0 < nearest < self.stages:
                moved[nearest] = border
        return moved if (np.diff(moved) > 0).all() else places

    def moves(self, places: Indices) -> Indices:
        """One cut moved, and time moved from the busiest ranks' stages to any: (moves, stages + 1)."""
        found = []
        for step in STEPS:
            moved = np.repeat(places[None], self.stages - 1, axis=0)
            index = np.arange(1, self.stages)
            moved[index - 1, index] += step
            found.append(moved)
        middle = self.middle
        by_load = np.argsort(-(self.turns(places[None])[0] @ self.turns_of), kind="stable")
        giving, taking = (
            np.flatnonzero(self.turns_of[:, ranks].any(axis=1))
            for ranks in (by_load[:BUSIEST], by_load[-IDLEST:])
        )
        cuts = np.arange(self.stages + 1)
        # Time goes from one stage to another with all cuts in between, so that the stages there keep theirs:
        #
        #     stages      0 | 1  |   2   |  3           from 3 to 1: the cuts 2 and 3 move up
        #              -> 0 | 1    |   2   |  3         1 is longer, 3 shorter, 2 as long as before
        #
        away = np.multiply.outer((1, -1), SHARES)[:, :, None]
        up, down = nearest_places(middle, middle[places] + away * middle[-1] / self.stages)
        for giver in giving.tolist():
            for to, takers in ((up, taking[taking < giver]), (down, taking[taking > giver])):
                first, last = (np.minimum(takers, giver), np.maximum(takers, giver))
                between = (cuts > first[:, None]) & (cuts <= last[:, None])
                found.append(np.where(between, to[:, None], places).reshape(-1, len(cuts)))
        moved = np.concatenate(found)
        moved = moved[(np.diff(moved, axis=1).min(axis=1) > 0) & (moved[:, -1] == places[-1])]
        return np.asarray(moved, dtype=np.int64)


def level_starts(layout: Layout) -> Iterable[int]:
    """See `CutTimes.evenly`: all stages alike, or but one on each rank, the first or the last, left bare."""
    others = layout.stages - layout.ranks
    return dict.fromkeys((0, max(0, others), -max(0, others)))


def turns_of_ranks(placement: Sequence[int], stages: int, microbatches: int) -> Array:
    """(stages, ranks): how many turns of a stage a rank takes in a step.

    placement: the rank of each stage, of one replica after another.
    """
    turns_of = np.zeros((stages, max(placement) + 1))
    for index, rank in enumerate(placement):
        turns_of[index % stages, rank] += microbatches * stages / len(placement)
    return turns_of


def nearest_places(middle: Array, seconds: Array | float) -> Indices:
    """The places before which compute takes most nearly so long. middle: seconds before each place."""
    after = np.clip(np.searchsorted(middle, seconds), 1, len(middle) - 1)
    nearer = seconds - middle[after - 1] < middle[after] - seconds
    return np.asarray(after - nearer, dtype=np.int64)


class ClosedForm:
    """The slowest rank, and filling and draining the pipeline, of m micro-batches:

        m max over p ranks (sum of their stages' turns) + (p - 1) (sum of turn^2) / (sum of turn)

    The second term is the mean turn, each weighed by itself: between the plain mean and the longest, and
    smooth, so that of two cuts with the same busiest rank the more even one is shorter.

    known: whose stages take as much besides their ops as those of the cuts.
    """

    passes = PASSES

    def __init__(self, cuts: CutTimes, known: Candidate | None = None) -> None:
        self.cuts = cuts
        self.more = 0.0 if known is None else cuts.besides(known).sum(axis=0)

    def steps(self, places: Indices) -> Array:
        turns = self.cuts.turns(places) + self.more
        if not self.cuts.weighed:
            return self._sum(turns)
        return weigh_best(
            self.cuts, places, self._sum(turns), lambda some, more: self._sum(turns[some] + more)
        )

    def _sum(self, turns: Array) -> Array:
        fits = np.isfinite(turns).all(axis=1)
        turns = np.where(np.isfinite(turns).all(axis=1, keepdims=True), turns, 0.0)
        filled = (turns**2).sum(axis=1) / np.maximum(turns.sum(axis=1), 1e-300)
        steps = (turns @ self.cuts.turns_of).max(axis=1) + (self.cuts.ranks - 1) * filled
        return np.asarray(np.where(fits, steps, np.inf), dtype=np.float64)


class Turns(NamedTuple):
    """Actions that compute, each behind what it waits for.

    kind: F, I, W or B as 0 to 3.  before: the action before it in its row, -1 for none.  need, edge: of other
    stages, what it waits for and on which edge that comes; those of action a from `need_at[a]` on.
    """

    kind: Longs
    stage: Longs
    before: Longs
    need_at: Longs
    need: Longs
    edge: Longs


class InOrder:
    """columns: of an order, maybe of fewer micro-batches.  flow: of the stages, replicas included.
    message_s: of each edge, by (from stage, to stage); None for a chain: those of its cuts.
    """

    def __init__(
        self,
        cuts: CutTimes,
        columns: Columns,
        flow: Flow,
        message_s: Mapping[tuple[int, int], float] | None = None,
        known: Candidate | None = None,
    ) -> None:
        self.cuts, self.message_s = cuts, message_s
        self.count = int(columns.microbatch.max(initial=0)) + 1
        self.more, self.offset = np.zeros((3, cuts.stages)), 0.0
        self.turns, self.edges = _in_turn(columns, flow, cuts.stages)
        self.passes = min(PASSES, ACTIONS // max(1, len(self.turns.kind)))
        if known is not None:
            here, self.more = cuts.places(known.cuts)[None], cuts.besides(known)
            weighed, cuts.weighed = cuts.weighed, False
            self.offset = known.timeline.step_s - float(self.steps(here)[0])
            cuts.weighed = weighed

    def steps(self, places: Indices) -> Array:
        parts = self.cuts.of(places)
        if not self.cuts.weighed:
            return self._steps(places, parts + self.more[:, None])

        def again(some: Indices, exposed: Array) -> Array:
            own = parts[:, some]
            own[1] += exposed
            return self._steps(places[some], own)

        return weigh_best(self.cuts, places, self._steps(places, parts), again)

    def _steps(self, places: Indices, parts: Array) -> Array:
        cuts, count, actions = self.cuts, len(places), len(self.turns.kind)
        finite = np.isfinite(parts)
        parts = np.where(finite, parts, 0.0)
        seconds = np.empty((4, cuts.stages, count))
        seconds[:3] = parts.transpose(0, 2, 1)
        np.add(seconds[1], seconds[2], out=seconds[3])
        late = np.empty((len(self.edges), count))
        for number, edge in enumerate(self.edges):
            late[number] = self._message(edge, places)
        total = np.zeros(count)
        end = np.zeros((actions, min(TOGETHER, max(1, ENTRIES // max(1, actions)))))
        last_ends.form(actions * count)(self.turns, seconds, late, end, total)
        total += self.offset
        if (missing := cuts.microbatches // cuts.layout.replicas - self.count) > 0:
            busy = parts.sum(axis=0) @ (cuts.turns_of / cuts.microbatches * cuts.layout.replicas)
            total = total + missing * busy.max(axis=1)
        return np.asarray(np.where(finite.all(axis=(0, 2)), total, np.inf), dtype=np.float64)

    def _message(self, edge: tuple[int, int], places: Indices) -> Array | float:
        if self.message_s is not None:
            return self.message_s.get(edge, 0.0)
        cuts, (source, target) = self.cuts, edge
        ranks = cuts.layout.placement[source], cuts.layout.placement[target]
        if ranks[0] == ranks[1]:
            return 0.0
        stages = source % cuts.stages, target % cuts.stages
        link = cuts.search.model.cluster.link(*stages)  # whose devices are those of the stages
        at = cuts.points[places[:, max(stages)]]
        crossing = cuts.search.model.tables.crossing_bytes[at]
        return np.asarray(link.latency_s + crossing / link.bandwidth_bytes_per_s)


@kernel
def last_ends(t: Turns, seconds: Array, late: Array, end: Array, last: Array) -> None:
    """When the last action of each cut ends: the longest path through the order.

    seconds: of actions, (kinds, stages, cuts).  late: of messages, (edges, cuts).  end: of actions, (actions,
    cuts of a block), written.
    """
    # The cuts of a block are the innermost loop, as processors do several of these at once.
    for low in range(0, len(last), end.shape[1]):
        count = min(end.shape[1], len(last) - low)
        for action in range(len(end)):
            kind, stage, before = t.kind[action], t.stage[action], t.before[action]
            for cut in range(count):
                end[action, cut] = end[before, cut] if before >= 0 else 0.0
            for at in range(t.need_at[action], t.need_at[action + 1]):
                need, edge = t.need[at], t.edge[at]
                for cut in range(count):
                    end[action, cut] = max(end[action, cut], end[need, cut] + late[edge, low + cut])
            for cut in range(count):
                end[action, cut] += seconds[kind, stage, low + cut]
                last[low + cut] = max(last[low + cut], end[action, cut])


def _in_turn(columns: Columns, flow: Flow, stages: int) -> tuple[Turns, list[tuple[int, int]]]:
    """The actions of an order, and the edges on which they wait.  stages: of one replica."""
    rows = zip(*(c.tolist() for c in (columns.kind, columns.stage, columns.microbatch)), strict=True)
    entries, number = list(rows), {F_: 0, I_: 1, W_: 2, B_: 3}
    made: dict[tuple[bool, int, int], int] = {}
    edges: dict[tuple[int, int], int] = {}
    kinds, own, rows_before, need_at = list[int](), list[int](), list[int](), [0]
    need, edge = list[int](), list[int]()
    at, ends = columns.offsets[:-1].tolist(), columns.offsets[1:].tolist()
    before = [-1] * columns.ranks
    waiting = list(range(columns.ranks))
    while waiting:
        moved, rest = False, []
        for rank in waiting:
            while at[rank] < ends[rank]:
                kind, stage, batch = entries[at[rank]]
                others: Sequence[int] = ()
                if kind in (F_, B_, I_):
                    others = flow.reads_from[stage] if kind == F_ else flow.gradients_from[stage]
                    if not all((kind == F_, other, batch) in made for other in others):
                        break
                at[rank] += 1
                moved = True
                if kind not in number:
                    continue
                if kind != W_:
                    made[kind == F_, stage, batch] = len(kinds)
                need += [made[kind == F_, other, batch] for other in others]
                edge += [edges.setdefault((other, stage), len(edges)) for other in others]
                need_at.append(len(need))
                rows_before.append(before[rank])
                before[rank] = len(kinds)
                kinds.append(number[kind])
                own.append(stage % stages)
            else:
                continue
            rest.append(rank)
        assert moved or not rest, "an order that cannot run"
        waiting = rest
    lists = (kinds, own, rows_before, need_at, need, edge)
    return Turns(*(np.array(one, np.int64) for one in lists)), list(edges)


def weigh_best(
    cuts: CutTimes, places: Indices, steps: Array, again: Callable[[Indices, Array], Array]
) -> Array:
    """The best of some cuts with what is freed to keep their caps; inf for all others.

    again: (which, seconds beyond computing of their stages) -> seconds of the step.
    """
    most = None if len(cuts.points) <= FEW_PLACES else WEIGHED
    some = np.asarray(np.argsort(steps, kind="stable")[:most], dtype=np.int64)
    found = np.full(len(places), np.inf)
    found[some] = again(some, cuts.exposed(places[some]))
    return found


def neighbours(estimate: Estimate, places: Indices, most: int) -> list[Indices]:
    """What becomes of cuts by one move: the best of different ones."""
    moved = estimate.cuts.moves(places)
    if not len(moved):
        return []
    steps = estimate.steps(moved)
    different: dict[bytes, Indices] = {}
    for index in np.argsort(steps, kind="stable"):
        if len(different) == most or steps[index] == np.inf:
            break
        different.setdefault(moved[index].tobytes(), moved[index])
    return list(different.values())


def climb(estimate: Estimate, places: Indices) -> list[Indices]:
    """What becomes of cuts that are moved while that makes the step shorter, the best first; of few places
    the best of all cuts."""
    cuts = estimate.cuts
    if cuts.possible_cuts <= ALL_CUTS:
        every = cuts.every_cut()
        steps = estimate.steps(every)
        order = np.argsort(steps, kind="stable")
        return [every[index] for index in order if steps[index] < np.inf]
    trail, best = [places], float(estimate.steps(places[None])[0])
    for _ in range(estimate.passes):
        moved = cuts.moves(trail[-1])
        moved = moved[(moved != trail[-1]).any(axis=1)]
        if not len(moved):
            break
        steps = estimate.steps(moved)
        index = int(np.argmin(steps))
        if not steps[index] < LESS * best:
            break
        best = float(steps[index])
        trail.append(moved[index])
    return trail[::-1]
