"""The list scheduler: an event-driven run of all ranks that decides, at each moment, what each does next.

Every (stage, kind) is a stream: its actions run in a fixed order of micro-batches, so a rank only ever
chooses between the heads of its few streams. An action is announced to its users when it *starts*, as its
end is known then; so a rank sees what will arrive soon, and a filler (W) runs only where it fits the gap.

Time is near linear: each action costs one event, and a look at the heads of the rank's streams. What goes on
inside is in `inner_loop`; here it is started, and pairs and predicates, which ask Python functions, are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from ...ir.action import Action
from ...ir.columns import Rows
from ...ir.errors import DeadlockError
from ...ir.schedule import Pair
from . import inner_loop
from .inner_loop import FILLABLE, TOO_LONG, State, Tables
from .problem import EPS, Outcome, SchedulingProblem
from .tables import as_lists, columns_in, tables_of


def run(task: SchedulingProblem, within_s: float = inf) -> Outcome | None:
    """Order everything; None as soon as it is certain that the step takes longer than `within_s`.

    Raises: DeadlockError if the limits leave no rank anything that it may run.
    """
    # A pair may take less time than its two actions: then what is left is not known.
    t, s = tables_of(task, inf if task.together is not None else within_s + EPS)
    pairs: list[Pair] = []
    ruled = task.together is not None or task.before is not None
    order_all = inner_loop.order_all.form(0 if ruled else len(t.order))
    if ruled or order_all is inner_loop.order_all.interpreted:
        t, s = as_lists(t), as_lists(s)
    look = inner_loop.look.interpreted
    for index in range(len(task.streams)):
        look(t, s, index)
    if ruled:
        pairs = _Ruled(task, t, s).run()
    elif order_all(t, s, task.ranks) == TOO_LONG:
        return None
    if sum(s.next) < len(t.order):
        raise _stuck(task, t, s)
    return _outcome(task, t, s, tuple(pairs))


def _outcome(task: SchedulingProblem, t: Tables, s: State, pairs: tuple[Pair, ...]) -> Outcome:
    starts = np.split(np.asarray(s.start), t.row_at[1:-1])
    ends = list(map(float, s.free))
    spans = [end - float(start[0]) for end, start in zip(ends, starts, strict=True) if len(start)]
    return Outcome(
        rows=Rows(columns_in(task, t, s)),
        step_s=max(ends),
        span_s=max(spans, default=0.0),
        peak=tuple(map(float, s.peak)),
        starts=tuple(starts),
        pairs=pairs,
    )


class _Ruled:
    """A run in which functions of the user decide: which actions go in pairs, and which before others."""

    def __init__(self, task: SchedulingProblem, t: Tables, s: State) -> None:
        self.task, self.t, self.s = task, t, s
        # Place of the first action of a fixed pair -> stream and micro-batch of the second.
        self.second: dict[int, tuple[int, int]] = {}
        stream_of = {(stream.stage, stream.kind): i for i, stream in enumerate(task.streams)}
        for one, two in task.paired.items():
            place = stream_of[one.stage, one.kind] * t.size + one.microbatch
            self.second[place] = stream_of[two.stage, two.kind], two.microbatch
        self.pairs: list[Pair] = []
        self.may_open = inner_loop.may_open.interpreted
        self.begin = inner_loop.begin.interpreted

    def run(self) -> list[Pair]:
        """The same as `inner_loop.order_all`."""
        t, s = self.t, self.s
        choose, wake = inner_loop.choose.interpreted, inner_loop.wake.interpreted
        for rank in range(self.task.ranks):
            inner_loop.push.interpreted(s, 0.0, rank)
        while s.events[0]:
            now, count = wake(s)
            woken = list(s.woken[:count])
            for fill in (False, True):
                left = []
                for rank in woken:
                    if s.free[rank] > now + EPS:
                        continue
                    self._hold(rank)
                    index = choose(t, s, rank, now, fill)
                    if index >= 0:
                        self._begin(rank, index, now)
                    elif index == FILLABLE:
                        left.append(rank)
                woken = left
        return self.pairs

    def _own(self, rank: int) -> Sequence[int]:
        return self.t.own[self.t.own_at[rank] : self.t.own_at[rank + 1]]  # type: ignore[return-value]

    def _hold(self, rank: int) -> None:
        """Hold back what must wait for another action of the rank, or for the other one of its pair."""
        for index in self._own(rank):
            if self.s.batch[index] >= 0 and not self.s.fills[index]:
                free = self._is_turn(rank, index)
                self.s.hold[index] = self._partner_ready(index) if free else inf

    def _is_turn(self, rank: int, index: int) -> bool:
        before = self.task.before
        if before is None:
            return True
        action = self._head(index)
        others = (self._head(i) for i in self._own(rank) if i != index and self.s.batch[i] >= 0)
        return not any(before(other, action) for other in others)

    def _partner_ready(self, index: int) -> float:
        """When the other action of a fixed pair has what it needs; 0 without one."""
        second = self.second.get(index * self.t.size + self.s.batch[index])
        if second is None:
            return 0.0
        other, b = second
        full = self.t.opens[other] and not self.may_open(self.t, self.s, other, b)
        place = other * self.t.size + b
        return inf if full or self.s.missing[place] else float(self.s.arrival[place])

    def _begin(self, rank: int, index: int, now: float) -> None:
        task, t, s = self.task, self.t, self.s
        pair = [index]
        fixed = self.second.get(index * t.size + s.batch[index])
        if fixed is not None:
            pair = [index, fixed[0]]
        elif task.together is not None and task.row_of is None and not s.fills[index]:
            pair = self._companions(rank, index, now)
        before, after = (sum(self._around(i)[side] for i in pair) for side in (0, 1))
        if len(pair) == 1:
            end = now + before + t.seconds[index]
        else:
            assert task.joint is not None
            first, second = map(self._head, pair)
            self.pairs.append((first, second))
            end = now + before + task.joint(first, second)
        for member in pair:
            others = t.unit[t.unit_at[member] : t.unit_at[member + 1]]
            self.begin(t, s, member, now, end, end + after)
            for other in others:  # of a stage on several ranks; not in pairs
                self.begin(t, s, int(other), now, end, end + sum(self._around(int(other))))

    def _companions(self, rank: int, index: int, now: float) -> list[int]:
        """A stream and one that may run with it now, in the order in which they run; or it alone."""
        t, s, together = self.t, self.s, self.task.together
        assert together is not None
        action = self._head(index)
        for other in self._own(rank):
            if self.task.streams[index].unit or self.task.streams[other].unit:
                continue
            if other == index or s.ready[other] > now + EPS or (t.opens[other] and t.opens[index]):
                continue
            if t.opens[other] and not self.may_open(t, s, other, s.batch[other]):
                continue
            if together(action, self._head(other)):
                return [index, other]
            if together(self._head(other), action):
                return [other, index]
        return [index]

    def _around(self, index: int) -> tuple[float, float]:
        """Seconds of what stands right before and right after the stream's next action."""
        place = index * self.t.size + self.s.batch[index]
        return (self.t.before[place], self.t.after[place]) if len(self.t.before) else (0.0, 0.0)

    def _head(self, index: int) -> Action:
        return self.task.streams[index].action(int(self.s.batch[index]))


def _stuck(task: SchedulingProblem, t: Tables, s: State) -> DeadlockError:
    full, waits = zip(*_waits(task, t, s), strict=True)
    if any(full):
        return DeadlockError(
            "the limits block this order: " + "; ".join(waits[:16]),
            hint="limit each chunk on its own (in_flight_stage), so the last one has room, or order by a "
            "clock=, which keeps room for the forwards that let memory go",
        )
    at_fault = "the rows" if task.row_of is not None else "what before= holds back"
    return DeadlockError("no rank can move: " + "; ".join(waits[:16]), hint=f"reorder {at_fault}")


def _waits(task: SchedulingProblem, t: Tables, s: State) -> Iterator[tuple[bool, str]]:
    """Of each rank that has not run all whether a limit holds it up, and in words what does."""
    for rank in range(task.ranks):
        own = t.own[t.own_at[rank] : t.own_at[rank + 1]]
        heads = [int(i) for i in own if s.batch[i] >= 0]
        at = t.line_at[rank] + s.head[rank]
        if task.row_of is not None and at < t.line_at[rank + 1]:
            heads = [int(t.line[at])]
        heads.sort(key=lambda i: s.missing[i * t.size + s.batch[i]] > 0)  # those at hand first
        full = [i for i in heads if _is_full(t, s, i)]
        if full:
            action = task.streams[full[0]].action(int(s.batch[full[0]]))
            opened = f"{s.opened[rank]} micro-batches open"
            yield True, f"rank {rank} has {action} at hand but its limit is full ({opened})"
        elif heads:
            index, b = heads[0], int(s.batch[heads[0]])
            needed = [
                str(other.action(b))
                for i, other in enumerate(task.streams)
                if any(user == index for user, _ in other.feeds) and not _has_run(t, s, i, b)
            ] or [str(task.streams[i].action(b)) for i in task.streams[index].unit]
            action = task.streams[index].action(b)
            others = (task.streams[i].action(int(s.batch[i])) for i in own if s.batch[i] >= 0 and i != index)
            first = [str(other) for other in others if task.before is not None and task.before(other, action)]
            if needed:
                what = f"needs {needed[0]}"
            elif first:
                what = f"is held back by {first[0]}, which before= puts first"
            else:
                what = "is held back by the rows, in which another action stands first"
            yield False, f"rank {rank} at {action} {what}"


def _is_full(t: Tables, s: State, index: int) -> bool:
    """Whether only a limit keeps the next action of a stream from running."""
    b = s.batch[index]
    at_hand = s.missing[index * t.size + b] == 0
    return bool(at_hand and t.opens[index] and not inner_loop.may_open.interpreted(t, s, index, b))


def _has_run(t: Tables, s: State, index: int, b: int) -> bool:
    begin = t.order_at[index]
    return b in list(t.order[begin : begin + s.next[index]])
