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
from .inner_loop import TOO_LONG
from .loop_tables import SchedulerState, Tables
from .problem import EPS, Outcome, SchedulingProblem
from .tables import as_lists, columns_in, tables_of


def run(task: SchedulingProblem, within_s: float = inf) -> Outcome | None:
    """Order everything; None as soon as it is certain that the step takes longer than `within_s`.

    Raises: DeadlockError if the limits leave no rank anything that it may run.
    """
    # A pair may take less time than its two actions: then what is left is not known.
    t, s = tables_of(task, inf if task.together is not None else within_s + EPS)
    rules = _Rules(task) if task.together is not None or task.before is not None else None
    order_all = inner_loop.order_all.form(len(t.order)) if rules is None else rules.order_all
    if rules is not None or order_all is inner_loop.order_all.interpreted:
        t, s = as_lists(t), as_lists(s)
    look = inner_loop.look.interpreted
    for index in range(len(task.streams)):
        look(t, s, index)
    if order_all(t, s, task.ranks) == TOO_LONG:
        return None
    if sum(s.next) < len(t.order):
        raise _stuck(task, t, s)
    return _outcome(task, t, s, tuple(rules.pairs) if rules is not None else ())


def _outcome(task: SchedulingProblem, t: Tables, s: SchedulerState, pairs: tuple[Pair, ...]) -> Outcome:
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


class _Rules:
    """What functions of the user decide: which actions go in pairs, and which before others.

    A pair is a unit like the actions of a stage on several ranks, but on one rank, and made where the loop
    comes to it: whether two actions go together may depend on any of their numbers.
    """

    def __init__(self, task: SchedulingProblem) -> None:
        self.task = task
        self.stream_of = {(stream.stage, stream.kind): i for i, stream in enumerate(task.streams)}
        self.pairs: list[Pair] = []
        self.order_all = inner_loop.order_all.calling(hold_back=self._hold_back, begin_unit=self._begin_unit)

    def _hold_back(self, t: Tables, s: SchedulerState, rank: int) -> None:
        """Hold back what must wait for another action of the rank, or for the other one of its pair."""
        for index in _own(t, rank):
            if s.batch[index] >= 0 and not s.fills[index]:
                free = self._is_turn(t, s, rank, index)
                s.hold[index] = self._partner_ready(t, s, index) if free else inf

    def _is_turn(self, t: Tables, s: SchedulerState, rank: int, index: int) -> bool:
        before = self.task.before
        if before is None:
            return True
        action = self._head(s, index)
        others = (self._head(s, i) for i in _own(t, rank) if i != index and s.batch[i] >= 0)
        return not any(before(other, action) for other in others)

    def _second(self, s: SchedulerState, index: int) -> tuple[int, int] | None:
        """Stream and micro-batch of what goes with the next action of a stream, in fixed rows."""
        action = self.task.paired.get(self._head(s, index)) if self.task.paired else None
        return None if action is None else (self.stream_of[action.stage, action.kind], action.microbatch)

    def _partner_ready(self, t: Tables, s: SchedulerState, index: int) -> float:
        """When the other action of a fixed pair has what it needs; 0 without one."""
        second = self._second(s, index)
        if second is None:
            return 0.0
        other, b = second
        full = t.opens[other] and not inner_loop.may_open.interpreted(t, s, other, b)
        place = other * t.size + b
        return inf if full or s.missing[place] else float(s.arrival[place])

    def _begin_unit(self, t: Tables, s: SchedulerState, index: int, now: float) -> None:
        """As `inner_loop.begin_unit`, where the unit may be a pair."""
        task = self.task
        pair = [index]
        fixed = self._second(s, index)
        if fixed is not None:
            pair = [index, fixed[0]]
        elif task.together is not None and task.row_of is None and not s.fills[index]:
            pair = self._companions(t, s, index, now)
        if len(pair) == 1:
            inner_loop.begin_unit.interpreted(t, s, index, now)
            return
        assert task.joint is not None
        first, second = (self._head(s, i) for i in pair)
        self.pairs.append((first, second))
        before, after = (sum(self._around(t, s, i)[side] for i in pair) for side in (0, 1))
        end = now + before + task.joint(first, second)
        for member in pair:
            inner_loop.begin.interpreted(t, s, member, now, end, end + after)

    def _companions(self, t: Tables, s: SchedulerState, index: int, now: float) -> list[int]:
        """A stream and one that may run with it now, in the order in which they run; or it alone."""
        together = self.task.together
        assert together is not None
        action = self._head(s, index)
        for other in _own(t, t.rank[index]):
            if self.task.streams[index].unit or self.task.streams[other].unit:
                continue
            if other == index or s.ready[other] > now + EPS or (t.opens[other] and t.opens[index]):
                continue
            if t.opens[other] and not inner_loop.may_open.interpreted(t, s, other, s.batch[other]):
                continue
            if together(action, self._head(s, other)):
                return [index, other]
            if together(self._head(s, other), action):
                return [other, index]
        return [index]

    def _around(self, t: Tables, s: SchedulerState, index: int) -> tuple[float, float]:
        """Seconds of what stands right before and right after the stream's next action."""
        place = index * t.size + s.batch[index]
        return (t.before[place], t.after[place]) if len(t.before) else (0.0, 0.0)

    def _head(self, s: SchedulerState, index: int) -> Action:
        return self.task.streams[index].action(int(s.batch[index]))


def _own(t: Tables, rank: int) -> Sequence[int]:
    """The streams of a rank."""
    return t.own[t.own_at[rank] : t.own_at[rank + 1]]  # type: ignore[return-value]


def _stuck(task: SchedulingProblem, t: Tables, s: SchedulerState) -> DeadlockError:
    full, waits = zip(*_waits(task, t, s), strict=True)
    if any(full):
        return DeadlockError(
            "the limits block this order: " + "; ".join(waits[:16]),
            hint="limit each chunk on its own (in_flight_stage), so the last one has room, or order by a "
            "clock=, which keeps room for the forwards that let memory go",
        )
    at_fault = "the rows" if task.row_of is not None else "what before= holds back"
    return DeadlockError("no rank can move: " + "; ".join(waits[:16]), hint=f"reorder {at_fault}")


def _waits(task: SchedulingProblem, t: Tables, s: SchedulerState) -> Iterator[tuple[bool, str]]:
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


def _is_full(t: Tables, s: SchedulerState, index: int) -> bool:
    """Whether only a limit keeps the next action of a stream from running."""
    b = s.batch[index]
    at_hand = s.missing[index * t.size + b] == 0
    return bool(at_hand and t.opens[index] and not inner_loop.may_open.interpreted(t, s, index, b))


def _has_run(t: Tables, s: SchedulerState, index: int, b: int) -> bool:
    begin = t.order_at[index]
    return b in list(t.order[begin : begin + s.next[index]])
