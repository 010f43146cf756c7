"""The list scheduler: an event-driven run of all ranks that decides, at each moment, what each does next.

Every (stage, kind) is a stream: its actions run in a fixed order of micro-batches, so a rank only ever
chooses between the heads of its few streams. An action is announced to its users when it *starts*, as its
end is known then; so a rank sees what will arrive soon, and a filler (W) runs only where it fits the gap.

Time is near linear: each action costs one event, and a look at the heads of the rank's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from ..ir.action import Action, Kind
from ..ir.errors import DeadlockError, ScheduleError

EPS = 1e-9
"""Times and sizes this close (relative to 1 s, 1 unit) are equal."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """All actions of one kind on one stage.

    feeds: (stream index, seconds until it sees the result) of every stream that uses a result.
    needs: how many results each action of this stream waits for.
    memory: change when an action starts, if above 0, or ends, if below: residuals come with F and go
        with B or W.
    filler: runs only where nothing else can.  opens, closes: F opens a micro-batch, B or I closes it.
    """

    stage: int
    kind: Kind
    rank: int
    seconds: float
    memory: float
    feeds: tuple[tuple[int, float], ...]
    needs: int
    order: Sequence[int]
    filler: bool = False
    opens: bool = False
    closes: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the list scheduler is asked to order.

    key: smaller goes first among what a rank could run.  row_of: the exact order of everything but the
        fillers, per rank, or None.  memory, open_rank, open_stage: limits; `inf` for none.
    safe: per rank an order of everything that keeps to the limits: an F runs ahead of its place in that
        order only if the rest of it then still keeps to them, so that limits can never block.
    before: before(a, b) is true if `a` must run before `b`, both on one rank.
    patience: share of its own time for which an action waits for a more urgent one that is on its way;
    overlap: share of a filler that may stick out of the gap it fills.
    early: which F may run ahead of their place in the safe order: "all", "warm" (until the rank's first B or
        I) or "none".
    """

    streams: tuple[Stream, ...]
    ranks: int
    key: Callable[[Action], object] | None = None
    row_of: tuple[tuple[Action, ...], ...] | None = None
    safe: bool = False
    memory: tuple[float, ...] = ()
    open_rank: tuple[float, ...] = ()
    open_stage: tuple[float, ...] = ()
    before: Callable[[Action, Action], bool] | None = None
    patience: float = 0.0
    overlap: float = 0.0
    early: str = "all"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """rows: the actions of each rank.  step_s: until the last rank ends.  span_s: longest first-to-last time
    of a rank.  peak: most memory of each rank."""

    rows: tuple[tuple[Action, ...], ...]
    step_s: float
    span_s: float
    peak: tuple[float, ...]
    starts: tuple[tuple[float, ...], ...] = field(repr=False)


def run(task: Task) -> Outcome:
    """Order everything.

    Raises: DeadlockError if the limits leave no rank anything that it may run.
    """
    return _Run(task).outcome()


class _Run:
    def __init__(self, task: Task) -> None:
        self.task = task
        streams = task.streams
        count = len(streams)
        size = max((max(s.order, default=-1) + 1 for s in streams), default=0)
        self.next = [0] * count
        self.missing = [[s.needs] * size for s in streams]
        self.arrival = [[0.0] * size for _ in streams]
        self.own: list[list[int]] = [[] for _ in range(task.ranks)]
        for index, s in enumerate(streams):
            self.own[s.rank].append(index)
        self.actions = [{b: Action(s.stage, s.kind, b) for b in s.order} for s in streams]
        self.free = [0.0] * task.ranks
        self.used = [0.0] * task.ranks
        self.owed = [0.0] * task.ranks  # what fillers that could run now would give back
        self.peak = [0.0] * task.ranks
        self.open_rank = [0] * task.ranks
        self.closed = [False] * task.ranks
        self.open_stage = [0] * (max((s.stage for s in streams), default=0) + 1)
        self.rows: list[list[Action]] = [[] for _ in range(task.ranks)]
        self.starts: list[list[float]] = [[] for _ in range(task.ranks)]
        self.place = self._places()
        self.head = [0] * task.ranks
        self.done: list[list[bool]] = [[False] * len(o) for o in self.order]

    def _places(self) -> list[dict[int, object]]:
        """Stream -> micro-batch -> what it is sorted by; and `order`, the whole order of each rank."""
        task, streams = self.task, self.task.streams
        place: list[dict[int, object]] = [{} for _ in streams]
        self.order: list[list[tuple[int, int]]] = [[] for _ in range(task.ranks)]
        if task.row_of is not None:
            index_of = {(s.stage, s.kind): i for i, s in enumerate(streams)}
            for rank, row in enumerate(task.row_of):
                for position, action in enumerate(row):
                    stream = index_of[action.stage, action.kind]
                    place[stream][action.microbatch] = position
                    self.order[rank].append((stream, action.microbatch))
            self._refuse_gaps(place)
            return place
        assert task.key is not None
        keyed: list[list[tuple[object, int, int]]] = [[] for _ in range(task.ranks)]
        for i, s in enumerate(streams):
            for b in s.order:
                k = task.key(self.actions[i][b])
                place[i][b] = k
                if task.safe:
                    keyed[s.rank].append((k, i, b))
        if task.safe:
            for rank, entries in enumerate(keyed):
                entries.sort()
                for position, (_, i, b) in enumerate(entries):
                    place[i][b] = position
                    self.order[rank].append((i, b))
        return place

    def _refuse_gaps(self, place: list[dict[int, object]]) -> None:
        for index, s in enumerate(self.task.streams):
            if not s.filler and len(place[index]) < len(s.order):
                lacking = next(self.actions[index][b] for b in s.order if b not in place[index])
                raise ScheduleError(
                    f"the rows never run {lacking}", hint=f"add it to the row of rank {s.rank}"
                )

    def outcome(self) -> Outcome:
        task = self.task
        events: list[tuple[float, int]] = [(0.0, rank) for rank in range(task.ranks)]
        self.events = events
        while events:
            now = events[0][0]
            woken: list[int] = []
            while events and events[0][0] <= now + EPS:
                now = max(now, events[0][0])
                rank = heappop(events)[1]
                if self.free[rank] <= now + EPS and rank not in woken:
                    woken.append(rank)
            waiting = [rank for rank in woken if not self._work(rank, now, fill=False)]
            for rank in waiting:
                self._work(rank, now, fill=True)
        if any(self.next[i] < len(s.order) for i, s in enumerate(task.streams)):
            raise self._stuck()
        ends = self.free
        spans = [end - s[0] for end, s in zip(ends, self.starts, strict=True) if s]
        return Outcome(
            rows=tuple(map(tuple, self.rows)), step_s=max(ends), span_s=max(spans, default=0.0),
            peak=tuple(self.peak), starts=tuple(map(tuple, self.starts)),
        )  # fmt: skip

    def _work(self, rank: int, now: float, *, fill: bool) -> bool:
        """Start the best action that `rank` may run now, if there is one."""
        task, streams = self.task, self.task.streams
        best, best_key = -1, None
        filler, filler_key = -1, None
        soon, soon_key = inf, None
        full = False
        late = now + EPS
        strict = task.row_of is not None
        for index in self.own[rank]:
            s = streams[index]
            position = self.next[index]
            if position >= len(s.order):
                continue
            b = s.order[position]
            if self.missing[index][b]:
                continue
            arrival = self.arrival[index][b]
            if s.filler:
                if arrival <= late and (filler < 0 or arrival < filler_key):  # type: ignore[operator]
                    filler, filler_key = index, arrival
                continue
            key = self.place[index][b]
            if strict and key != self.head[rank]:
                continue
            if best >= 0 and key > best_key and arrival <= late:  # type: ignore[operator]
                continue
            if s.opens and not self._may_open(rank, index, b):
                full = full or arrival <= late
                continue
            if task.before is not None and not self._is_turn(rank, self.actions[index][b]):
                continue
            if arrival <= late:
                best, best_key = index, key
            elif arrival < soon:
                soon, soon_key = arrival, key
        if best >= 0:
            wait = task.patience * streams[best].seconds
            if wait and soon < now + wait - EPS and soon_key < best_key:  # type: ignore[operator]
                best = -1
            else:
                self._start(best, now)
                return True
        if fill and filler >= 0:
            room = streams[filler].seconds * (1 - task.overlap)
            if full or soon >= now + room - EPS:
                self._start(filler, now)
                return True
        return False

    def _is_turn(self, rank: int, action: Action) -> bool:
        before = self.task.before
        assert before is not None
        for index in self.own[rank]:
            position = self.next[index]
            s = self.task.streams[index]
            if position < len(s.order):
                other = self.actions[index][s.order[position]]
                if other != action and before(other, action):
                    return False
        return True

    def _may_open(self, rank: int, index: int, b: int) -> bool:
        task, s = self.task, self.task.streams[index]
        if task.open_rank and self.open_rank[rank] >= task.open_rank[rank]:
            return False
        if task.open_stage and self.open_stage[s.stage] >= task.open_stage[s.stage]:
            return False
        if not task.memory:
            return True
        limit = task.memory[rank] + EPS
        if self.used[rank] + s.memory > limit:
            return False
        return not task.safe or self._safe(rank, index, b, limit)

    def _safe(self, rank: int, index: int, b: int, limit: float) -> bool:
        """Whether the rest of the safe order keeps to the limit if this F runs now."""
        order, done, streams = self.order[rank], self.done[rank], self.task.streams
        mine = self.place[index][b]
        assert isinstance(mine, int)
        early = self.task.early
        if early == "none" or (early == "warm" and self.closed[rank]):
            for position in range(self.head[rank], mine):
                if not done[position] and not streams[order[position][0]].filler:
                    return False
        level = self.used[rank] - self.owed[rank] + streams[index].memory
        for position in range(self.head[rank], mine):
            if not done[position]:
                level += streams[order[position][0]].memory
                if level > limit:
                    return False
        return True

    def _start(self, index: int, now: float) -> None:
        task, s = self.task, self.task.streams[index]
        rank, b = s.rank, s.order[self.next[index]]
        self.next[index] += 1
        end = now + s.seconds
        self.rows[rank].append(self.actions[index][b])
        self.starts[rank].append(now)
        self.free[rank] = end
        self.used[rank] += s.memory
        self.peak[rank] = max(self.peak[rank], self.used[rank])
        if s.filler:
            self.owed[rank] += s.memory
        if s.opens:
            self.open_rank[rank] += 1
            self.open_stage[s.stage] += 1
        elif s.closes:
            self.open_rank[rank] -= 1
            self.closed[rank] = True
            self.open_stage[s.stage] -= 1
        if task.row_of is not None:
            self.head[rank] += not s.filler
        elif task.safe:
            place, done = self.place[index][b], self.done[rank]
            assert isinstance(place, int)
            done[place] = True
            head = self.head[rank]
            while head < len(done) and done[head]:
                head += 1
            self.head[rank] = head
        heappush(self.events, (end, rank))
        for user, delay in s.feeds:
            missing = self.missing[user]
            missing[b] -= 1
            seen = end + delay
            if seen > self.arrival[user][b]:
                self.arrival[user][b] = seen
            if not missing[b]:
                u = task.streams[user]
                if u.filler:
                    self.owed[rank] -= u.memory
                if self.arrival[user][b] > end or u.rank != rank:
                    heappush(self.events, (self.arrival[user][b], u.rank))

    def _stuck(self) -> DeadlockError:
        task = self.task
        lines = []
        for rank in range(task.ranks):
            heads = [
                self.actions[i][task.streams[i].order[self.next[i]]]
                for i in self.own[rank]
                if self.next[i] < len(task.streams[i].order)
            ]
            ready = [a for a in heads if not self.missing[self._index(a)][a.microbatch]]
            if ready:
                lines.append(
                    f"rank {rank} has {ready[0]} at hand but its limit is full "
                    f"({self.open_rank[rank]} micro-batches open)"
                )
            elif heads:
                lines.append(f"rank {rank} waits to run {heads[0]}")
        return DeadlockError(
            "the limits block this order: " + "; ".join(lines[:16]),
            hint="limit each chunk on its own (in_flight_stage), so the last one has room, or order by a "
            "clock=, which keeps room for the forwards that let memory go",
        )

    def _index(self, action: Action) -> int:
        return next(
            i for i, s in enumerate(self.task.streams) if s.stage == action.stage and s.kind == action.kind
        )
