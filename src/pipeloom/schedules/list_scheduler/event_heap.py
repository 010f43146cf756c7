"""When which rank looks around: a heap of moments in the state of the list scheduler's loop."""

from __future__ import annotations

from ...ir.kernels import kernel
from .loop_tables import SchedulerState
from .problem import EPS


@kernel
def push(s: SchedulerState, moment: float, rank: int) -> None:
    """Let a rank look around at a moment."""
    at = s.events[0]
    s.events[0] += 1
    while at > 0:
        up = (at - 1) >> 1
        if s.event[up] < moment or (s.event[up] == moment and s.event_rank[up] <= rank):
            break
        s.event[at], s.event_rank[at] = s.event[up], s.event_rank[up]
        at = up
    s.event[at], s.event_rank[at] = moment, rank


@kernel
def pop(s: SchedulerState) -> int:
    """The rank that looks around first; of several the lowest."""
    first: int = s.event_rank[0]
    s.events[0] -= 1
    count = s.events[0]
    moment, rank = s.event[count], s.event_rank[count]
    at, down = 0, 1
    while down < count:
        if down + 1 < count and (
            s.event[down + 1] < s.event[down]
            or (s.event[down + 1] == s.event[down] and s.event_rank[down + 1] < s.event_rank[down])
        ):
            down += 1
        if moment < s.event[down] or (moment == s.event[down] and rank <= s.event_rank[down]):
            break
        s.event[at], s.event_rank[at] = s.event[down], s.event_rank[down]
        at, down = down, 2 * down + 1
    s.event[at], s.event_rank[at] = moment, rank
    return first


@kernel
def wake(s: SchedulerState) -> tuple[float, int]:
    """The time, and how many free ranks look around then: the first so many of `s.woken`."""
    now, count = s.event[0], 0
    while s.events[0] > 0 and s.event[0] <= now + EPS:
        now = max(now, s.event[0])
        rank = pop(s)
        if s.free[rank] <= now + EPS and not s.marked[rank]:
            s.woken[count] = rank
            s.marked[rank] = True
            count += 1
    for i in range(count):
        s.marked[s.woken[i]] = False
    return now, count
