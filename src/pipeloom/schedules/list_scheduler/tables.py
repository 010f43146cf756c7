"""What the loop of the list scheduler works on: arrays.

A stream is all actions of one kind on one stage, which run in a fixed order of micro-batches. The streams of
a shape, with what they wait for, are made once (`streams_of`); a recipe adds its limits, and the places of
actions in the order that it gives (`tables_of`).

Lists of different lengths lie one after another: those of i are `x[x_at[i] : x_at[i + 1]]`. For two stages,
two micro-batches and the kinds F and B:

    stream        0      1      2      3            own   [0 1 | 2 3]        of ranks 0 and 1
                  0F     0B     1F     1B           feeds [2 1 | - | 3 | 1]  0F is read by 1F and 0B
    order        [0 1  | 0 1  | 0 1  | 0 1]         0B misses two things, 0F none
    line, rank 0 [0 0 1 1]                          the order 0F0 0F1 0B0 0B1, by streams
    place of 0B  [2 3]                              where 0B0 and 0B1 stand in it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...ir.action import Action, B, F, I, Kind, W
from ...ir.columns import B_, CODE, CODED, Bools, Columns, Floats, Longs, Rows, columns_of
from ...ir.dependencies import needs
from ...ir.errors import ScheduleError, of_type
from ...ir.operation import OPERATIONS, Operation
from ..language.recipe import EARLY, PerRank, Recipe, is_number, per_rank
from ..language.shape import Periodic, Shape

EPS = 1e-9
"""Times and sizes this close (relative to 1 s, 1 unit) are equal."""

NEVER = 1 << 40
"""So many things are missing that an action never runs: its stage does not have it at that micro-batch."""

ALL, WARM, NONE = range(len(EARLY))


class Tables(NamedTuple):
    """What does not change. Per stream, per rank, per place in a rank's order.

    seconds, memory: of an action; memory changes when it starts, if above 0, or ends, if below.
    urgent: others wait for its results.  filler: runs only where nothing else can.  drains: the same once all
    forwards of the rank have begun.  opens, closes: F opens a micro-batch, B or I closes it.
    order: micro-batches of each stream, those of stream i from `order_at[i]` on.
    feeds: streams that use the results of stream i, from `feeds_at[i]` on.  delay: seconds until they are
    there.  route: the link that the message takes, or -1 on one rank.
    place: of an action in the order of its rank, or its key as a number; -1 if it has none.  line: stream of
    each place in that order, those of rank r from `line_at[r]` on; empty for keys.
    own: the streams of rank r, from `own_at[r]` on.  limit, open_rank, open_stage: `inf` for none.
    before, after: seconds of what a user inserted beside an action; empty if nothing is.
    unit: the other streams of the stream's unit, those of stream i from `unit_at[i]` on: on other ranks, in
    the same order of micro-batches. All of a unit begin together.
    strict: `place` is the exact order of all but fillers.  safe: it is a promise, see `Recipe.clock`.
    within: seconds after which a run is given up.
    """

    size: int
    rank: Longs
    stage: Longs
    seconds: Floats
    memory: Floats
    urgent: Bools
    filler: Bools
    drains: Bools
    opens: Bools
    closes: Bools
    order_at: Longs
    order: Longs
    feeds_at: Longs
    feeds: Longs
    delay: Floats
    place: Longs
    line_at: Longs
    line: Longs
    own_at: Longs
    own: Longs
    limit: Floats
    open_rank: Floats
    open_stage: Floats
    before: Floats
    after: Floats
    unit_at: Longs
    unit: Longs
    row_at: Longs
    route: Longs
    strict: bool
    safe: bool
    level: bool
    early: int
    patience: float
    overlap: tuple[float, float]
    within: float = inf


class SchedulerState(NamedTuple):
    """What changes. Per stream its next action: position, micro-batch, key, when it could start (`ready`) and
    what holds it back besides, and whether it fills gaps by now; per action what it still waits for and when
    the rest is there; per rank when it is free, how long it was idle between its actions (and last the most
    of all), what it holds, what fillers owe it, and how far it is; the rows, as in `Tables.row_at`; per link
    when it is free; `event` and `event_rank` are a heap of when which rank looks around, of `events[0]`."""

    next: Longs
    batch: Longs
    key: Longs
    ready: Floats
    hold: Floats
    fills: Bools
    missing: Longs
    arrival: Floats
    free: Floats
    idle: Floats
    used: Floats
    owed: Floats
    peak: Floats
    left: Floats
    opened: Longs
    opened_stage: Longs
    unopened: Longs
    closed: Bools
    head: Longs
    done: Bools
    woken: Longs
    marked: Bools
    written: Longs
    row: Longs
    row_batch: Longs
    start: Floats
    link: Floats
    event: Floats
    event_rank: Longs
    events: Longs


Table = TypeVar("Table", Tables, SchedulerState)


@dataclass(frozen=True, kw_only=True, eq=False)
class Streams:
    """The streams of a shape. kinds, orders: of each its kind, and its micro-batches in their order.

    fixed: what no recipe changes of `Tables`.  missing, left, unopened: of the state at the start.
    """

    kinds: tuple[Kind, ...]
    orders: tuple[Longs, ...]
    size: int
    stage: Longs
    rank: Longs
    fixed: Mapping[str, Any]
    missing: Longs
    left: Floats
    unopened: Longs

    def action(self, index: int, microbatch: int) -> Action:
        return Action(int(self.stage[index]), self.kinds[index], int(microbatch))


@dataclass(frozen=True, kw_only=True, eq=False)
class RecipeTables:
    """What a recipe asks of a shape. listed: its rows, if it gives any, without fillers.  beside: the
    operations that go next to their anchors when all else is ordered."""

    shape: Shape
    recipe: Recipe
    streams: Streams
    tables: Tables
    listed: Rows | None
    beside: tuple[Operation, ...]

    def new_state(self) -> SchedulerState:
        t, streams = self.tables, self.streams
        count, actions, ranks = len(t.rank), len(t.order), len(t.limit)
        # One per rank at first; of each action one when it ends, and one when its data are there. A rank that
        # waits for a unit adds one, but the one that woke it has just been taken out.
        events = 2 * actions + ranks
        return SchedulerState(
            next=_zeros(count),
            batch=_zeros(count) - 1,
            key=_zeros(count),
            ready=np.full(count, inf),
            hold=np.zeros(count),
            fills=t.filler.copy(),
            missing=streams.missing.copy(),
            arrival=np.zeros(count * t.size),
            free=np.zeros(ranks),
            idle=np.zeros(ranks + 1),
            used=np.zeros(ranks),
            owed=np.zeros(ranks),
            peak=np.zeros(ranks),
            left=streams.left.copy(),
            opened=_zeros(ranks),
            opened_stage=_zeros(len(t.open_stage)),
            unopened=streams.unopened.copy(),
            closed=np.zeros(ranks, np.bool_),
            head=_zeros(ranks),
            done=np.zeros(len(t.line), np.bool_),
            woken=_zeros(ranks),
            marked=np.zeros(ranks, np.bool_),
            written=_zeros(ranks),
            row=_zeros(actions),
            row_batch=_zeros(actions),
            start=np.zeros(actions),
            link=np.zeros(ranks**2),
            event=np.zeros(events),
            event_rank=_zeros(events),
            events=_zeros(1),
        )

    def columns(self, s: SchedulerState) -> Columns:
        codes: dict[Kind, int] = dict(CODE)
        for kind in self.streams.kinds:
            codes.setdefault(kind, len(codes))
        row = np.asarray(s.row)
        return Columns(
            kind=np.array([codes[kind] for kind in self.streams.kinds], np.int16)[row],
            stage=self.tables.stage.astype(np.int32)[row],
            microbatch=np.asarray(s.row_batch, np.int32),
            peer=np.full(len(row), -1, np.int32),
            offsets=self.tables.row_at,
            kinds=CODED if len(codes) == len(CODED) else tuple(codes),
        )


def as_lists(table: Table) -> Table:
    """The same with lists: reading one element of an array takes Python three times as long."""
    return type(table)(*(x.tolist() if isinstance(x, np.ndarray) else x for x in table))  # type: ignore[arg-type]


def tables_of(shape: Shape, recipe: Recipe, like: RecipeTables | None = None) -> RecipeTables:
    """like: those of another recipe for the shape, which often differs in a few numbers only."""
    if like is not None and all(getattr(recipe, key) is getattr(like.recipe, key) for key in _NOT_TIMING):
        return replace(like, recipe=recipe, tables=like.tables._replace(**_timing(recipe)))
    if recipe.slices < 1 or shape.microbatches % recipe.slices:
        raise ScheduleError(
            f"{shape.microbatches} actions per stage for {recipe.slices} slices a micro-batch",
            hint="let the slices divide them",
        )
    listed = _listed(shape, recipe)
    named = set(recipe.fill)
    if listed is not None:
        named |= {listed.columns.kinds[code] for code in np.unique(listed.columns.kind).tolist()}
    loose = tuple(o for o in recipe.insert if o.kind in named)  # these find their own place, as W does
    for operation in loose:
        if operation.before is not None and operation.kind in recipe.fill:
            raise ScheduleError(
                f"{operation.kind} runs before {operation.before}, so it cannot fill gaps",
                hint="leave it out of fill=, or declare it with after=",
            )
    beside = tuple(o for o in recipe.insert if o not in loose)
    streams = _streams_of(shape, recipe, loose, listed)
    filler = np.array([kind in recipe.fill for kind in streams.kinds], np.bool_)
    places = _Places(shape, streams, filler)
    if listed is not None:
        columns = listed.columns
        fills = [
            code for code, kind in enumerate(columns.kinds) if kind in recipe.fill and kind in streams.kinds
        ]
        if (filling := np.isin(columns.kind, fills)).any():
            listed = Rows(columns.where(~filling))
        place, line_at, line = places.by_rows(listed.columns)
    elif recipe.clock is not None:
        place, line_at, line = places.by_clock(recipe.clock)
    else:
        assert recipe.priority is not None
        place, line_at, line = places.by_key(recipe.priority)
    memory, limit = _memory(shape, recipe, streams, beside)
    before, after = _around(shape, streams, beside)
    tables = Tables(
        **streams.fixed,
        **_timing(recipe),
        memory=memory,
        filler=filler,
        drains=np.array([kind in recipe.drain for kind in streams.kinds], np.bool_),
        place=place,
        line_at=line_at,
        line=line,
        limit=limit,
        open_rank=_limits(recipe.in_flight, range(shape.ranks)),
        open_stage=_limits(recipe.in_flight_stage, range(len(shape.placement))),
        before=before,
        after=after,
        strict=listed is not None,
        safe=recipe.clock is not None,
    )
    return RecipeTables(
        shape=shape, recipe=recipe, streams=streams, tables=tables, listed=listed, beside=beside
    )


_NOT_TIMING = {field.name for field in fields(Recipe)} - {"level", "early", "patience", "overlap"}


def _timing(recipe: Recipe) -> dict[str, Any]:
    overlap = recipe.overlap if isinstance(recipe.overlap, tuple) else (recipe.overlap, recipe.overlap)
    return {
        "level": recipe.level,
        "early": EARLY.index(recipe.early),
        "patience": float(recipe.patience),
        "overlap": (float(overlap[0]), float(overlap[1])),
    }


def _listed(shape: Shape, recipe: Recipe) -> Rows | None:
    rows = recipe.rows
    if rows is None:
        return None
    listed = [rows(r) for r in range(shape.ranks)] if callable(rows) else rows
    if len(listed) != shape.ranks:
        raise ScheduleError(f"{len(listed)} rows for {shape.ranks} ranks", hint="give one row per rank")
    if isinstance(listed, Rows):
        return listed
    made = [tuple(row) if isinstance(row, Iterable) else (row,) for row in listed]
    for step in chain.from_iterable(made):
        if not isinstance(step, Action):
            raise ScheduleError(
                f"rows= has {of_type(step)} in place of an action", hint="write Action(0, F, 3) for 0F3"
            )
    return Rows(columns_of(made))


def _streams_of(shape: Shape, recipe: Recipe, loose: Sequence[Operation], listed: Rows | None) -> Streams:
    kinds = tuple(recipe.kinds_of(stage) for stage in range(len(shape.placement)))
    # Stages and micro-batches whose backward the rows run as one B, where a stage may do either.
    whole: frozenset[tuple[int, int]] = frozenset()
    if listed is not None and recipe.kinds not in ("F", "FB", "FIW"):
        at = listed.columns.kind == B_
        pairs = zip(listed.columns.stage[at].tolist(), listed.columns.microbatch[at].tolist(), strict=True)
        whole = frozenset(pairs)
    if loose or whole:
        return _streams(shape, recipe.slices, kinds, loose, whole)
    key = ("streams", kinds, recipe.slices)
    if key not in shape.memo:
        shape.memo[key] = _streams(shape, recipe.slices, kinds, (), whole)
    streams: Streams = shape.memo[key]
    return streams


def _streams(
    shape: Shape,
    slices: int,
    built_in: Sequence[tuple[Kind, ...]],
    loose: Sequence[Operation],
    whole: frozenset[tuple[int, int]],
) -> Streams:
    placement, flow = shape.placement, shape.flow
    kinds_of = [
        (*own, *(o.kind for o in loose if any(o.runs(s, placement[s], b) for b in range(shape.microbatches))))
        for s, own in enumerate(built_in)
    ]
    pairs = [(stage, kind) for stage, own in enumerate(kinds_of) for kind in own]
    index = {pair: number for number, pair in enumerate(pairs)}
    feeds: list[list[tuple[int, float]]] = [[] for _ in pairs]
    needed = [0] * len(pairs)
    # Messages of one action to one rank follow each other: those of forwards in the order of the data.
    place = {stage: number for number, stage in enumerate(flow.order)}
    for target in sorted(pairs, key=lambda pair: (0, place[pair[0]]) if pair[1] == F else (1, 0)):
        for source, ways in _sources(shape, target, kinds_of):
            needed[index[target]] += 1
            for kind in ways:
                feeds[index[source, kind]].append((index[target], shape.delay_s(source, target[0])))
    units = [
        [index[other, kind] for other in flow.shards.get(stage, ())] if kind in (F, B, I) else []
        for stage, kind in pairs
    ]
    orders = tuple(np.asarray(_order(shape, slices, s, kinds_of[s], k, whole), np.int64) for s, k in pairs)
    size = max((int(order.max()) + 1 for order in orders if len(order)), default=0)
    rank = np.array([placement[stage] for stage, _ in pairs], np.int64)
    stages = np.array([stage for stage, _ in pairs], np.int64)
    lengths = np.array([len(order) for order in orders], np.int64)
    occupies = [kind not in OPERATIONS or OPERATIONS[kind].stream == "compute" for _, kind in pairs]
    seconds = np.array([shape.seconds(s, k) if o else 0.0 for (s, k), o in zip(pairs, occupies, strict=True)])
    opens = np.array([kind == F for _, kind in pairs], np.bool_)
    edges = [(source, user, delay) for source, own in enumerate(feeds) for user, delay in own]
    routes = [rank[source] * shape.ranks + rank[user] if delay > 0 else -1 for source, user, delay in edges]
    fixed = {
        "size": size,
        "rank": rank,
        "stage": stages,
        "seconds": seconds,
        # An I that only its own W waits for holds up nobody in the drain.
        "urgent": np.array([any(pairs[user][1] != W for user, _ in own) for own in feeds], np.bool_),
        "opens": opens,
        "closes": np.array([kind in (B, I) for _, kind in pairs], np.bool_),
        "order_at": _offsets(lengths),
        "order": np.concatenate([*orders, _zeros(0)]),
        "feeds_at": _offsets([len(own) for own in feeds]),
        "feeds": np.array([user for _, user, _ in edges], np.int64),
        "delay": np.array([delay for _, _, delay in edges], np.float64),
        "route": np.array(routes, np.int64),
        "own_at": _offsets(np.bincount(rank, minlength=shape.ranks)),
        "own": np.argsort(rank, kind="stable"),
        "unit_at": _offsets([len(unit) for unit in units]),
        "unit": np.array([other for unit in units for other in unit], np.int64),
        "row_at": _offsets(np.bincount(rank, lengths, shape.ranks).astype(np.int64)),
    }
    missing = np.repeat(np.array(needed, np.int64)[:, None], size, axis=1)
    for number in np.flatnonzero(lengths < size).tolist():
        runs = np.zeros(size, np.bool_)
        runs[orders[number]] = True
        missing[number, ~runs] = NEVER
    return Streams(
        kinds=tuple(kind for _, kind in pairs),
        orders=orders,
        size=size,
        stage=stages,
        rank=rank,
        fixed=fixed,
        missing=missing.reshape(-1),
        left=np.bincount(rank, seconds * lengths, shape.ranks).astype(np.float64),
        unopened=np.bincount(rank, opens * lengths, shape.ranks).astype(np.int64),
    )


def _sources(
    shape: Shape, target: tuple[int, Kind], kinds_of: Sequence[Sequence[Kind]]
) -> list[tuple[int, Sequence[Kind]]]:
    """What an action waits for: stages, each with the kinds of which it runs one for a micro-batch."""
    stage, kind = target
    operation = OPERATIONS.get(kind)
    if operation is not None:
        anchors = [own for own in kinds_of[stage] if operation.stands_at(own)]
        return [(stage, anchors)] if operation.after is not None else []
    if kind == W:
        return [(stage, (I,))]
    return [
        (source, [own for own in kinds_of[source] if own in (B, I)] if phase else (F,))
        for source, _, phase in needs(Action(stage, kind, 0), shape.flow)
    ]


def _order(
    shape: Shape,
    slices: int,
    stage: int,
    kinds: Sequence[Kind],
    kind: Kind,
    whole: frozenset[tuple[int, int]],
) -> Sequence[int]:
    """Micro-batches in the order in which a stream runs them; slices go back where they came from."""
    order: Sequence[int] = range(shape.microbatches)
    if slices > 1 and kind != F:
        order = [low + slices - 1 - i for low in range(0, shape.microbatches, slices) for i in range(slices)]
    if kind in OPERATIONS:
        order = [b for b in order if OPERATIONS[kind].runs(stage, shape.placement[stage], b)]
    elif kind in (B, I, W) and B in kinds and I in kinds:
        order = [b for b in order if ((stage, b) in whole) == (kind == B)]
    return order


def _memory(
    shape: Shape, recipe: Recipe, streams: Streams, beside: Sequence[Operation]
) -> tuple[Floats, Floats]:
    """What each stream adds or gives back, and each rank's limit: in bytes where bytes are limited.

    Operations count where bytes do: by what they leave, if they run at every micro-batch; and the most that
    one of them needs for itself is kept free.
    """
    ranks = range(shape.ranks)
    stages = streams.stage.tolist()
    if recipe.memory_bytes is None and shape.limit_bytes is None:
        most = inf if recipe.memory is None else recipe.memory
        share = [1.0 / len(own) for own in shape.rank_stages]
        sign = {F: 1.0, B: -1.0, W: -1.0}
        changes = [
            sign.get(kind, 0.0) * share[shape.placement[s]]
            for s, kind in zip(stages, streams.kinds, strict=True)
        ]
        return np.array(changes), np.array([per_rank(most, rank) for rank in ranks])

    def change(stage: int, kind: Kind) -> float:
        if (operation := OPERATIONS.get(kind)) is not None:
            return float(operation.acquired(stage) - operation.released(stage))
        near = [o for o in beside if o.every == 1 and o.stands_at(kind)]
        runs = [o for o in near if o.runs(stage, shape.placement[stage], 0)]
        left = sum(o.acquired(stage) - o.released(stage) for o in runs)
        return float(shape.costs[stage].held_change(kind) + left)

    def free(rank: int) -> int:
        """Bytes that operations hold only while they run."""
        both = [(o, s) for o in recipe.insert for s in shape.rank_stages[rank]]
        return max((min(o.acquired(s), o.released(s)) for o, s in both), default=0)

    limits = list(shape.limits_bytes)
    if recipe.memory_bytes is not None:
        limits = [min(limit, per_rank(recipe.memory_bytes, r)) for r, limit in enumerate(limits)]
    changes = [change(s, kind) for s, kind in zip(stages, streams.kinds, strict=True)]
    return np.array(changes), np.array([limit - free(rank) for rank, limit in enumerate(limits)], np.float64)


def _around(shape: Shape, streams: Streams, beside: Sequence[Operation]) -> tuple[Floats, Floats]:
    """Seconds of what stands right before and right after each action; empty if nothing does."""
    if not beside:
        return np.zeros(0), np.zeros(0)
    size = streams.size
    both = np.zeros((2, len(streams.kinds), size))
    some = False
    for index, (kind, order) in enumerate(zip(streams.kinds, streams.orders, strict=True)):
        stage, rank = int(streams.stage[index]), int(streams.rank[index])
        near = [o for o in beside if o.stands_at(kind)]
        # What runs beside computing costs the rank nothing, unless the anchor must wait for it.
        front = [o for o in near if o.before is not None and (o.stream == "compute" or not o.ahead)]
        behind = [o for o in near if o.after is not None and o.stream == "compute"]
        for side, operations in enumerate((front, behind)):
            some = some or bool(operations)
            for b in order.tolist() if operations else ():
                running = (o for o in operations if o.runs(stage, rank, b))
                both[side, index, b] = sum(shape.seconds(stage, o.kind) for o in running)
    return (both[0].reshape(-1), both[1].reshape(-1)) if some else (np.zeros(0), np.zeros(0))


class _Places:
    """`place`, `line_at` and `line` of the tables, from the order that a recipe gives."""

    def __init__(self, shape: Shape, streams: Streams, filler: Bools) -> None:
        self.shape, self.streams, self.filler = shape, streams, filler
        self.place = np.full((len(streams.kinds), streams.size), -1, np.int64)
        self.own = [np.flatnonzero(streams.rank == r).tolist() for r in range(shape.ranks)]

    def by_key(self, key: Callable[[Action], Any]) -> tuple[Longs, Longs, Longs]:
        for own in self.own:
            entries = [
                (key(self.streams.action(index, b)), index, b)
                for index in own
                for b in self.streams.orders[index].tolist()
            ]
            try:
                entries.sort(key=lambda entry: entry[0])
            except TypeError as error:  # of a number and a text, or of None
                raise ScheduleError(
                    f"what priority= returns cannot be compared: {error}",
                    hint="return a number for every action, or a tuple of as many",
                ) from error
            number, last = -1, None
            for value, index, b in entries:
                if number < 0 or value != last:
                    number, last = number + 1, value
                self.place[index, b] = number
        return self.place.reshape(-1), _zeros(self.shape.ranks + 1), _zeros(0)

    def by_clock(self, clock: Callable[[int, Kind, int], float]) -> tuple[Longs, Longs, Longs]:
        """At equal times backwards come first, as they let memory go, and later stages first."""
        kinds, orders, stages = self.streams.kinds, self.streams.orders, self.streams.stage.tolist()
        place = {stage: number for number, stage in enumerate(self.shape.flow.order)}
        shards = self.shape.flow.shards
        # The same for all ranks of a stage, so that these have their units in one order.
        depth = [place[min(s, *shards.get(s, (s,)))] for s in range(len(place))]

        def moments_of(stage: int, kind: Kind, order: Longs) -> Floats:
            if isinstance(clock, Periodic):
                return np.asarray(clock(stage, kind, 0) + clock.period * order, np.float64)
            moments = [clock(stage, kind, b) for b in order.tolist()]
            for b, moment in zip(order.tolist(), moments, strict=True):
                if not is_number(moment):
                    raise ScheduleError(
                        f"clock= returns {moment!r} for {stage}{kind}{b}",
                        hint="return a number for every action",
                    )
            return np.array(moments, np.float64)

        lines = []
        for own in self.own:
            own.sort(key=lambda i: (kinds[i] == F, -depth[stages[i]], i))
            stream = np.repeat(np.array(own, np.int64), [len(orders[i]) for i in own])
            batch = np.concatenate([orders[i] for i in own])
            moments = np.concatenate([moments_of(stages[i], kinds[i], orders[i]) for i in own])
            order = np.argsort(moments, kind="stable")
            lines.append(stream[order])
            self.place[stream[order], batch[order]] = np.arange(len(order))
        return self.place.reshape(-1), _offsets([len(line) for line in lines]), np.concatenate(lines)

    def by_rows(self, rows: Columns) -> tuple[Longs, Longs, Longs]:
        streams, stages = self.streams, len(self.shape.placement)
        stream = np.full((stages, len(rows.kinds)), -1, np.int64)
        codes = {kind: code for code, kind in reversed(list(enumerate(rows.kinds)))}
        for index, kind in enumerate(streams.kinds):
            if kind in codes:
                stream[streams.stage[index], codes[kind]] = index
        known = (rows.stage >= 0) & (rows.stage < stages)
        line = np.where(known, stream[np.where(known, rows.stage, 0), rows.kind], -1)
        if (line < 0).any():
            at = int(np.argmax(line < 0))
            action = rows.at(at)
            raise ScheduleError(
                f"the row of rank {rows.rank_of(at)} has {action}, but stage {action.stage} has no "
                f"{action.kind}",
                hint="add the kind to kinds= or insert=, or drop the action",
            )
        self._refuse_strays(rows, line)
        position = np.arange(len(line)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))
        self.place[line, rows.microbatch] = position
        for index, order in enumerate(streams.orders):
            own = self.place[index, order]
            rank = int(streams.rank[index])
            if not self.filler[index] and (own < 0).any():
                lacking = streams.action(index, order[np.argmax(own < 0)])
                raise ScheduleError(f"the rows never run {lacking}", hint=f"add it to the row of rank {rank}")
            if (np.diff(own) < 0).any():
                at = int(np.argmax(np.diff(own) < 0))
                first, then = (streams.action(index, b) for b in order[at : at + 2])
                raise ScheduleError(
                    f"the row of rank {rank} has {then} in front of {first}",
                    hint=f"a stage runs the {first.kind} of its micro-batches in one order: {first}, "
                    f"then {then}",
                )
        return self.place.reshape(-1), rows.offsets, line

    def _refuse_strays(self, rows: Columns, line: Longs) -> None:
        """Entries that would never get their turn: in the wrong row, of no micro-batch, beside a B, or
        twice."""
        size = self.streams.size
        rank = np.repeat(np.arange(rows.ranks), np.diff(rows.offsets))
        out = (rows.microbatch < 0) | (rows.microbatch >= size)
        runs = self.streams.missing.reshape(-1, size) != NEVER
        # `unique` gives the first of equal actions: all others are there again.
        _, first = np.unique(line * size + rows.microbatch, return_index=True)
        again = np.ones(len(line), np.bool_)
        again[first] = False
        for bad, problem, hint in (
            (
                self.streams.rank[line] != rank,
                ", but stage {stage} is on another rank",
                "move it to the row of that rank, or place the stage here",
            ),
            (out, f", but there are {size} micro-batches", "drop it: micro-batches count from 0"),
            (
                ~runs[line, np.where(out, 0, rows.microbatch)],
                ", which its stage does not run at this micro-batch",
                "a micro-batch has B, or I and W; an operation only those that its every= says",
            ),
            (again, " a second time", "run every action once"),
        ):
            if bad.any():
                at = int(np.argmax(bad))
                where = f"the row of rank {rows.rank_of(at)} has {rows.at(at)}"
                raise ScheduleError(where + problem.format(stage=rows.stage[at]), hint=hint)


def _offsets(lengths: Sequence[int] | Longs) -> Longs:
    return np.array([0, *accumulate(lengths)], np.int64)


def _limits(limit: PerRank | float | None, each: Sequence[int]) -> Floats:
    return np.array([per_rank(inf if limit is None else limit, one) for one in each], np.float64)


def _zeros(count: int) -> Longs:
    return np.zeros(count, np.int64)
