"""The list scheduler: an event-driven run of all ranks that decides, at each moment, what each does next.

Every (stage, kind) is a stream: its actions run in a fixed order of micro-batches, so a rank only ever
chooses between the heads of its few streams. An action is announced to its users when it *starts*, as its
end is known then; so a rank sees what will arrive soon, and a filler (W) runs only where it fits the gap.

Time is near linear: each action costs one event, and a look at the heads of the rank's streams.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import starmap
from math import inf

from ..ir.action import Action, W
from ..ir.errors import DeadlockError, ScheduleError
from ..ir.schedule import Pair
from .task import EPS, Outcome, Stream, Task


def run(task: Task, within_s: float = inf) -> Outcome | None:
    """Order everything; None as soon as it is certain that the step takes longer than `within_s`.

    Raises: DeadlockError if the limits leave no rank anything that it may run.
    """
    try:
        return _Run(task, within_s).outcome()
    except _TooLong:
        return None


class _TooLong(Exception):
    """The work that a rank has left would end too late even without another gap."""


class _Run:
    def __init__(self, task: Task, within_s: float) -> None:
        self.task = task
        # A pair may take less time than its two actions: then what is left is not known.
        self.within = inf if task.together is not None else within_s + EPS
        streams = task.streams
        count = len(streams)
        size = max((max(s.order, default=-1) + 1 for s in streams), default=0)
        self.next = [0] * count
        self.missing = [[s.needs] * size for s in streams]
        self.arrival = [[0.0] * size for _ in streams]
        # Of the next action of each stream: its micro-batch, its place, and when it could start.
        self.batch = [-1] * count
        self.key: list[object] = [None] * count
        self.ready = [inf] * count
        self.own: list[list[int]] = [[] for _ in range(task.ranks)]
        self.left = [0.0] * task.ranks  # seconds of work
        self.unopened = [0] * task.ranks
        for index, s in enumerate(streams):
            self.own[s.rank].append(index)
            self.left[s.rank] += s.seconds * len(s.order)
            self.unopened[s.rank] += s.opens * len(s.order)
        # Others wait for its results; an I that only its own W waits for holds up nobody in the drain.
        self.urgent = [any(streams[u].kind != W for u, _ in s.feeds) for s in streams]
        self.plain = [[i for i in own if not streams[i].filler] for own in self.own]
        self.fillers = [[i for i in own if streams[i].filler] for own in self.own]
        self.runs = [set(s.order) if len(s.order) < size else range(size) for s in streams]
        self.free = [0.0] * task.ranks
        self.used = [0.0] * task.ranks
        self.owed = [0.0] * task.ranks  # what fillers that could run now would give back
        self.peak = [0.0] * task.ranks
        self.open_rank = [0] * task.ranks
        self.closed = [False] * task.ranks
        self.open_stage = [0] * (max((s.stage for s in streams), default=0) + 1)
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(task.ranks)]
        self.pairs: list[Pair] = []
        self.stream_of = {(s.stage, s.kind): i for i, s in enumerate(streams)}
        self.starts: list[list[float]] = [[] for _ in range(task.ranks)]
        self.place = self._places()
        self.head = [0] * task.ranks
        self.done: list[list[bool]] = [[False] * len(o) for o in self.order]
        for index in range(count):
            self._look(index)

    def _places(self) -> list[dict[int, object]]:
        """Stream -> micro-batch -> what it is sorted by; and `order`, the whole order of each rank."""
        task, streams = self.task, self.task.streams
        place: list[dict[int, object]] = [{} for _ in streams]
        self.order: list[list[tuple[int, int]]] = [[] for _ in range(task.ranks)]
        if task.row_of is not None:
            for rank, row in enumerate(task.row_of):
                for position, action in enumerate(row):
                    stream = self._stream(rank, action)
                    place[stream][action.microbatch] = position
                    self.order[rank].append((stream, action.microbatch))
            self._refuse_gaps(place)
            return place
        keyed: list[list[tuple[float, bool, int, int, int]]] = [[] for _ in range(task.ranks)]
        for i, s in enumerate(streams):
            if task.clock is not None:
                keyed[s.rank] += [(*task.clock(s.stage, s.kind, b), i, b) for b in s.order]
            else:
                assert task.key is not None
                place[i] = {b: task.key(self._action(i, b)) for b in s.order}
        for rank, entries in enumerate(keyed):
            entries.sort()
            for position, (*_, i, b) in enumerate(entries):
                place[i][b] = position
                self.order[rank].append((i, b))
        return place

    def _stream(self, rank: int, action: Action) -> int:
        found = self.stream_of.get((action.stage, action.kind))
        if found is None:
            raise ScheduleError(
                f"the row of rank {rank} has {action}, but stage {action.stage} has no {action.kind}",
                hint="add the kind to kinds= or insert=, or drop the action",
            )
        return found

    def _refuse_gaps(self, place: list[dict[int, object]]) -> None:
        for index, s in enumerate(self.task.streams):
            if not s.filler and len(place[index]) < len(s.order):
                lacking = next(self._action(index, b) for b in s.order if b not in place[index])
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
            waiting = [rank for rank in woken if self._work(rank, now, fill=False)]
            for rank in waiting:
                self._work(rank, now, fill=True)
        if any(self.next[i] < len(s.order) for i, s in enumerate(task.streams)):
            raise self._stuck()
        ends = self.free
        spans = [end - s[0] for end, s in zip(ends, self.starts, strict=True) if s]
        return Outcome(
            rows=tuple(tuple(starmap(self._action, row)) for row in self.rows),
            step_s=max(ends), span_s=max(spans, default=0.0),
            peak=tuple(self.peak), starts=tuple(map(tuple, self.starts)), pairs=tuple(self.pairs),
        )  # fmt: skip

    def _work(self, rank: int, now: float, *, fill: bool) -> bool:
        """Start the best action that `rank` may run now; otherwise say whether a filler could run."""
        task, ready, keys = self.task, self.ready, self.key
        best, best_key = -1, None
        soon, soon_key = inf, None
        full = False
        late = now + EPS
        strict = task.row_of is not None
        for index in self.plain[rank]:
            arrival, key = ready[index], keys[index]
            if arrival == inf or (strict and key != self.head[rank]):
                continue
            if task.paired:
                arrival = max(arrival, self._partner_ready(index))
            if best >= 0 and arrival <= late and key > best_key:  # type: ignore[operator]
                continue
            if task.streams[index].opens and not self._may_open(rank, index, self.batch[index]):
                full = full or arrival <= late
                continue
            if task.before is not None and not self._is_turn(rank, self._head(index)):
                continue
            if arrival <= late:
                best, best_key = index, key
            elif arrival < soon and (self.unopened[rank] or self.urgent[index]):
                soon, soon_key = arrival, key
        if best >= 0:
            wait = task.patience * task.streams[best].seconds
            if not (wait and soon < now + wait - EPS and soon_key < best_key):  # type: ignore[operator]
                self._start_with_partner(rank, best, now)
                return False
        filler = min(self.fillers[rank], key=ready.__getitem__, default=-1)
        if filler < 0 or ready[filler] > late:
            return False
        room = task.streams[filler].seconds * (1 - task.overlap[not self.unopened[rank]])
        if fill and (full or soon >= now + room - EPS):
            self._start(filler, now)
        return True

    def _partner_ready(self, index: int) -> float:
        """When the other action of a fixed pair has what it needs; 0 without one."""
        second = self.task.paired.get(self._head(index))
        if second is None:
            return 0.0
        other, b = self._index(second), second.microbatch
        full = self.task.streams[other].opens and not self._may_open(self.task.streams[other].rank, other, b)
        return inf if full or self.missing[other][b] else self.arrival[other][b]

    def _start_with_partner(self, rank: int, index: int, now: float) -> None:
        task = self.task
        if task.together is None:
            self._start(index, now)
            return
        action = self._head(index)
        pair = [index]
        if action in task.paired:
            pair = [index, self._index(task.paired[action])]
        elif task.row_of is None:
            pair = self._companions(rank, index, now)
        if len(pair) == 1:
            self._start(index, now)
            return
        assert task.joint is not None
        first, second = map(self._head, pair)
        self.pairs.append((first, second))
        before, after = map(sum, zip(*map(self._around, pair), strict=True))
        end = now + before + task.joint(first, second)
        for member in pair:
            self._start(member, now, (end, end + after))

    def _companions(self, rank: int, index: int, now: float) -> list[int]:
        """A stream and one that may run with it now, in the order in which they run; or it alone."""
        task, mine = self.task, self.task.streams[index]
        assert task.together is not None
        action = self._head(index)
        for other in self.own[rank]:
            s, b = task.streams[other], self.batch[other]
            if other == index or self.ready[other] > now + EPS or (s.opens and mine.opens):
                continue
            if s.opens and not self._may_open(rank, other, b):
                continue
            if task.together(action, self._action(other, b)):
                return [index, other]
            if task.together(self._action(other, b), action):
                return [other, index]
        return [index]

    def _around(self, index: int) -> tuple[float, float]:
        """Seconds of what stands right before and right after the stream's next action."""
        s = self.task.streams[index]
        return s.around(self.batch[index]) if s.around is not None else (0.0, 0.0)

    def _action(self, index: int, b: int) -> Action:
        s = self.task.streams[index]
        return Action(s.stage, s.kind, b)

    def _head(self, index: int) -> Action:
        return self._action(index, self.batch[index])

    def _look(self, index: int) -> None:
        """Note the next action of a stream, if there is one."""
        order, position = self.task.streams[index].order, self.next[index]
        if position >= len(order):
            self.batch[index], self.ready[index] = -1, inf
            return
        b = self.batch[index] = order[position]
        self.key[index] = self.place[index].get(b)
        self.ready[index] = inf if self.missing[index][b] else self.arrival[index][b]

    def _is_turn(self, rank: int, action: Action) -> bool:
        before = self.task.before
        assert before is not None
        for index in self.own[rank]:
            if self.batch[index] >= 0:
                other = self._head(index)
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
        return task.clock is None or self._safe(rank, index, b, limit)

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

    def _start(self, index: int, now: float, unit: tuple[float, float] | None = None) -> None:
        """unit: when the results of an action of a pair are there, and when the rank is free again."""
        s = self.task.streams[index]
        rank, b = s.rank, self.batch[index]
        if now + self.left[rank] > self.within:
            raise _TooLong
        self.left[rank] -= s.seconds
        if unit is not None:
            end, free = unit
        elif s.around is None:
            end = free = now + s.seconds
        else:
            before, after = s.around(b)
            end = now + before + s.seconds
            free = end + after
        self.free[rank] = free
        self.rows[rank].append((index, b))
        self.starts[rank].append(now)
        self.used[rank] += s.memory
        if s.filler:
            self.owed[rank] += s.memory
        else:
            self._count(rank, s)
        if self.order[rank]:
            self._tick_off(rank, self.place[index].get(b))
        self.next[index] += 1
        self._look(index)
        heappush(self.events, (free, rank))
        for user, delay in s.feeds:
            missing, arrival = self.missing[user], self.arrival[user]
            missing[b] -= 1
            if end + delay > arrival[b]:
                arrival[b] = end + delay
            if not missing[b]:
                self._announce(user, b, arrival[b], now)

    def _count(self, rank: int, s: Stream) -> None:
        """Keep account of what is open."""
        if self.used[rank] > self.peak[rank]:
            self.peak[rank] = self.used[rank]
        if s.opens:
            self.open_rank[rank] += 1
            self.open_stage[s.stage] += 1
            self.unopened[rank] -= 1
            if not self.unopened[rank]:
                self._drain(rank)
        elif s.closes:
            self.open_rank[rank] -= 1
            self.closed[rank] = True
            self.open_stage[s.stage] -= 1

    def _drain(self, rank: int) -> None:
        streams = self.task.streams
        if self.task.row_of is None:
            self.fillers[rank] += [i for i in self.plain[rank] if streams[i].drains]
            self.plain[rank] = [i for i in self.plain[rank] if not streams[i].drains]

    def _tick_off(self, rank: int, place: object) -> None:
        """Note that an action of the order of a rank, if it is in there, has started."""
        if not isinstance(place, int):
            return
        done, head = self.done[rank], self.head[rank]
        done[place] = True
        while head < len(done) and done[head]:
            head += 1
        self.head[rank] = head

    def _announce(self, user: int, b: int, seen: float, now: float) -> None:
        """All that an action of `user` waits for will be there at `seen`."""
        s = self.task.streams[user]
        if b not in self.runs[user]:
            return
        if s.filler:
            self.owed[s.rank] -= s.memory
        if self.batch[user] == b:
            self.ready[user] = seen
        # A rank that is busy until then looks around by itself when it is free.
        if seen > self.free[s.rank] or seen <= now + EPS:
            heappush(self.events, (seen, s.rank))

    def _stuck(self) -> DeadlockError:
        task = self.task
        lines = []
        for rank in range(task.ranks):
            heads = [self._head(i) for i in self.own[rank] if self.batch[i] >= 0]
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
        return self.stream_of[action.stage, action.kind]
