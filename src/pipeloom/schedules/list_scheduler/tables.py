"""A task as the tables that the list scheduler's loop works on, and its rows as columns."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...ir.action import Action, F, Kind
from ...ir.columns import CODE, CODED, Columns, Longs
from ...ir.errors import ScheduleError
from ..language.periodic import Periodic
from .inner_loop import ALL, NONE, WARM
from .loop_tables import SchedulerState, Tables
from .problem import SchedulingProblem, Stream

NEVER = 1 << 40
"""What an action that is not run waits for: more than there is."""

_EARLY = {"all": ALL, "warm": WARM, "none": NONE}
Table = TypeVar("Table", Tables, SchedulerState)


def tables_of(task: SchedulingProblem, within_s: float) -> tuple[Tables, SchedulerState]:
    """Tables of arrays, and the state before anything runs."""
    streams = task.streams
    orders = [np.asarray(s.order, np.int64) for s in streams]
    size = max((int(order.max()) + 1 for order in orders if len(order)), default=0)
    rank = np.array([s.rank for s in streams], np.int64)
    stages = max((s.stage for s in streams), default=0) + 1
    place, line_at, line = _places(task, orders, size)
    lengths = np.array([len(order) for order in orders], np.int64)
    seconds = np.array([s.seconds for s in streams], np.float64)
    opens = np.array([s.opens for s in streams], np.bool_)
    filler = np.array([s.filler for s in streams], np.bool_)
    per_rank = np.bincount(rank, lengths, task.ranks).astype(np.int64)
    before, after = _beside(streams, orders, size)
    t = Tables(
        size=size,
        rank=rank,
        stage=np.array([s.stage for s in streams], np.int64),
        seconds=seconds,
        memory=np.array([s.memory for s in streams], np.float64),
        # Others wait for its results; an I that only its own W waits for holds up nobody in the drain.
        urgent=np.array([any(streams[u].kind != "W" for u, _ in s.feeds) for s in streams], np.bool_),
        filler=filler,
        drains=np.array([s.drains for s in streams], np.bool_),
        opens=opens,
        closes=np.array([s.closes for s in streams], np.bool_),
        order_at=_offsets(lengths),
        order=np.concatenate([*orders, np.empty(0, np.int64)]),
        feeds_at=_offsets(np.array([len(s.feeds) for s in streams], np.int64)),
        feeds=np.array([user for s in streams for user, _ in s.feeds], np.int64),
        delay=np.array([delay for s in streams for _, delay in s.feeds], np.float64),
        place=place,
        line_at=line_at,
        line=line,
        own_at=_offsets(np.bincount(rank, minlength=task.ranks)),
        own=np.argsort(rank, kind="stable"),
        limit=_limits(task.memory, task.ranks),
        open_rank=_limits(task.open_rank, task.ranks),
        open_stage=_limits(task.open_stage, stages),
        before=before,
        after=after,
        unit_at=_offsets(np.array([len(s.unit) for s in streams], np.int64)),
        unit=np.array([other for s in streams for other in s.unit], np.int64),
        row_at=_offsets(per_rank),
        route=_routes(task),
        strict=task.row_of is not None,
        safe=task.clock is not None,
        level=task.level,
        early=_EARLY[task.early],
        patience=float(task.patience),
        overlap=(float(task.overlap[0]), float(task.overlap[1])),
        within=float(within_s),
    )
    return t, _state(task, t, lengths)


def _routes(task: SchedulingProblem) -> Longs:
    """Of each feed the link from its rank to the one that it feeds; -1 without a message."""
    return np.array(
        [
            s.rank * task.ranks + task.streams[user].rank if delay > 0 else -1
            for s in task.streams
            for user, delay in s.feeds
        ],
        np.int64,
    )


def _state(task: SchedulingProblem, t: Tables, lengths: Longs) -> SchedulerState:
    """Before anything runs. lengths: micro-batches of each stream."""
    streams, size = task.streams, t.size
    count, actions = len(streams), len(t.order)
    missing = np.repeat(np.array([s.needs for s in streams], np.int64)[:, None], size, axis=1)
    for index in np.flatnonzero(lengths < size).tolist():
        runs = np.zeros(size, np.bool_)
        runs[t.order[t.order_at[index] : t.order_at[index + 1]]] = True
        missing[index, ~runs] = NEVER
    left = np.bincount(t.rank, t.seconds * lengths, task.ranks).astype(np.float64)
    unopened = np.bincount(t.rank, t.opens * lengths, task.ranks).astype(np.int64)
    events = 2 * actions + task.ranks  # one when an action ends, one when its data are there
    return SchedulerState(
        next=_none(count),
        batch=_none(count) - 1,
        key=_none(count),
        ready=np.full(count, inf),
        hold=np.zeros(count),
        fills=t.filler.copy(),
        missing=missing.reshape(-1),
        arrival=np.zeros(count * size),
        free=np.zeros(task.ranks),
        idle=np.zeros(task.ranks + 1),
        used=np.zeros(task.ranks),
        owed=np.zeros(task.ranks),
        peak=np.zeros(task.ranks),
        left=left,
        opened=_none(task.ranks),
        opened_stage=_none(len(t.open_stage)),
        unopened=unopened,
        closed=np.zeros(task.ranks, np.bool_),
        head=_none(task.ranks),
        done=np.zeros(len(t.line), np.bool_),
        woken=_none(task.ranks),
        marked=np.zeros(task.ranks, np.bool_),
        written=_none(task.ranks),
        row=_none(actions),
        row_batch=_none(actions),
        start=np.zeros(actions),
        link=np.zeros(task.ranks**2),
        event=np.zeros(events),
        event_rank=_none(events),
        events=_none(1),
    )


def as_lists(table: Table) -> Table:
    """The same with lists: reading one element of an array takes Python three times as long."""
    return type(table)(*(x.tolist() if isinstance(x, np.ndarray) else x for x in table))  # type: ignore[arg-type]


def columns_in(task: SchedulingProblem, t: Tables, s: SchedulerState) -> Columns:
    """The rows that the loop has written."""
    codes: dict[Kind, int] = dict(CODE)
    for stream in task.streams:
        codes.setdefault(stream.kind, len(codes))
    kinds = np.array([codes[stream.kind] for stream in task.streams], np.int16)
    row = np.asarray(s.row)
    return Columns(
        kind=kinds[row],
        stage=np.asarray(t.stage, np.int32)[row],
        microbatch=np.asarray(s.row_batch, np.int32),
        peer=np.full(len(row), -1, np.int32),
        offsets=np.asarray(t.row_at),
        kinds=CODED if len(codes) == len(CODED) else tuple(codes),
    )


def _places(task: SchedulingProblem, orders: list[Longs], size: int) -> tuple[Longs, Longs, Longs]:
    """`place`, `line_at` and `line` of the tables."""
    if task.row_of is not None:
        return _by_rows(task, task.row_of.columns, orders, size)
    if task.clock is not None:
        return _by_clock(task, orders, size)
    assert task.key is not None
    place = np.full((len(orders), size), -1, np.int64)
    own: list[list[tuple[Any, int, int]]] = [[] for _ in range(task.ranks)]
    for index, stream in enumerate(task.streams):
        own[stream.rank] += [(task.key(stream.action(b)), index, b) for b in orders[index].tolist()]
    for entries in own:
        entries.sort(key=lambda entry: entry[0])
        number, last = -1, None
        for key, index, b in entries:
            if number < 0 or key != last:
                number, last = number + 1, key
            place[index, b] = number
    return place.reshape(-1), _none(task.ranks + 1), _none(0)


def _by_rows(
    task: SchedulingProblem, rows: Columns, orders: list[Longs], size: int
) -> tuple[Longs, Longs, Longs]:
    stages = max((s.stage for s in task.streams), default=0) + 1
    stream = np.full((stages, len(rows.kinds)), -1, np.int64)
    codes = {kind: code for code, kind in reversed(list(enumerate(rows.kinds)))}
    for index, s in enumerate(task.streams):
        if s.kind in codes:
            stream[s.stage, codes[s.kind]] = index
    known = (rows.stage >= 0) & (rows.stage < stages)
    line = np.where(known, stream[np.where(known, rows.stage, 0), rows.kind], -1)
    if (line < 0).any():
        at = int(np.argmax(line < 0))
        action = rows.at(at)
        raise ScheduleError(
            f"the row of rank {rows.rank_of(at)} has {action}, but stage {action.stage} has no {action.kind}",
            hint="add the kind to kinds= or insert=, or drop the action",
        )
    _refuse_strays(task, rows, line, orders, size)
    position = np.arange(len(line)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))
    place = np.full((len(orders), size), -1, np.int64)
    place[line, rows.microbatch] = position
    for index, s in enumerate(task.streams):
        own = place[index, orders[index]]
        if not s.filler and (own < 0).any():
            lacking = s.action(int(orders[index][np.argmax(own < 0)]))
            raise ScheduleError(f"the rows never run {lacking}", hint=f"add it to the row of rank {s.rank}")
        if (np.diff(own) < 0).any():
            at = int(np.argmax(np.diff(own) < 0))
            first, then = (s.action(int(b)) for b in orders[index][at : at + 2])
            raise ScheduleError(
                f"the row of rank {s.rank} has {then} in front of {first}",
                hint=f"a stage runs the {s.kind} of its micro-batches in one order: {first}, then {then}",
            )
    return place.reshape(-1), rows.offsets, line


def _refuse_strays(
    task: SchedulingProblem, rows: Columns, line: Longs, orders: list[Longs], size: int
) -> None:
    """Entries that would never get their turn: in the wrong row, of no micro-batch, beside a B, or twice."""

    def refuse(bad: NDArray[np.bool_], problem: Callable[[Action], str], hint: str) -> None:
        if bad.any():
            at = int(np.argmax(bad))
            action, where = rows.at(at), f"the row of rank {rows.rank_of(at)}"
            assert isinstance(action, Action)
            raise ScheduleError(f"{where} has {action}{problem(action)}", hint=hint)

    home = np.array([s.rank for s in task.streams], np.int64)
    rank = np.repeat(np.arange(len(rows.offsets) - 1), np.diff(rows.offsets))
    refuse(
        home[line] != rank,
        lambda a: f", but stage {a.stage} is on another rank",
        "move it to the row of that rank, or place the stage here",
    )
    refuse(
        (rows.microbatch < 0) | (rows.microbatch >= size),
        lambda a: f", but there are {size} micro-batches",
        "drop it: micro-batches count from 0",
    )
    runs = np.zeros((len(orders), size), np.bool_)
    for index, order in enumerate(orders):
        runs[index, order] = True
    refuse(
        ~runs[line, rows.microbatch],
        lambda a: ", which its stage does not run at this micro-batch",
        "a micro-batch has B, or I and W; an operation only those that its every= says",
    )
    _, first = np.unique(line * size + rows.microbatch, return_index=True)
    again = np.ones(len(line), np.bool_)
    again[first] = False
    refuse(again, lambda a: " a second time", "run every action once")


def _by_clock(task: SchedulingProblem, orders: list[Longs], size: int) -> tuple[Longs, Longs, Longs]:
    """At equal times backwards come first, as they let memory go, and later stages before earlier ones."""
    assert task.clock is not None
    place = np.full((len(orders), size), -1, np.int64)
    own: list[list[int]] = [[] for _ in range(task.ranks)]
    for index, s in enumerate(task.streams):
        own[s.rank].append(index)
    lines = []
    for indices in own:
        indices.sort(key=lambda i: (task.streams[i].kind == F, -task.depth[task.streams[i].stage], i))
        stream = np.repeat(np.array(indices, np.int64), [len(orders[i]) for i in indices])
        batch = np.concatenate([orders[i] for i in indices])
        moments = np.concatenate([_moments(task.clock, task.streams[i], orders[i]) for i in indices])
        order = np.argsort(moments, kind="stable")
        lines.append(stream[order])
        place[stream[order], batch[order]] = np.arange(len(order))
    line_at = _offsets(np.array([len(line) for line in lines], np.int64))
    return place.reshape(-1), line_at, np.concatenate(lines)


def _moments(clock: Callable[[int, Kind, int], float], s: Stream, order: Longs) -> NDArray[np.float64]:
    """What the clock says for each micro-batch of a stream."""
    if isinstance(clock, Periodic):
        return np.asarray(clock(s.stage, s.kind, 0) + clock.period * order, np.float64)
    return np.array([clock(s.stage, s.kind, b) for b in order.tolist()], np.float64)


def _beside(
    streams: tuple[Stream, ...], orders: list[Longs], size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of what stands right before and right after each action; empty if nothing does."""
    if all(s.around is None for s in streams):
        return np.empty(0), np.empty(0)
    both = np.zeros((2, len(streams), size))
    for index, s in enumerate(streams):
        if s.around is not None:
            for b in orders[index].tolist():
                both[:, index, b] = s.around(b)
    return both[0].reshape(-1), both[1].reshape(-1)


def _offsets(lengths: NDArray[np.int64]) -> Longs:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _limits(given: tuple[float, ...], count: int) -> NDArray[np.float64]:
    return np.array(given, np.float64) if given else np.full(count, inf)


def _none(count: int) -> Longs:
    return np.zeros(count, np.int64)
