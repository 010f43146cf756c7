"""Meetings: what several ranks come to before it begins; and waking those who wait."""

from __future__ import annotations

from ..ir.kernels import kernel
from .link_queue import request
from .loop_state import Layout, State


@kernel
def wake(s: State, rank: int) -> None:
    s.stack[s.ready[0]] = rank
    s.ready[0] += 1


@kernel
def together(p: Layout, s: State, rank: int, entry: int, clock: float) -> bool:
    """Whether all have come that begin together with an entry."""
    low, high = p.first_meet[entry], p.first_meet[entry + 1]
    if low < high and s.meet_at[entry] < 0:
        s.meet_at[entry] = max(clock, s.start[entry])  # not before what holds it has ended
        waiter = s.meet_waiter[entry]
        while waiter >= 0:
            wake(s, waiter)
            waiter = s.behind[waiter]
    for m in range(low, high):
        other = p.meets[m]
        if s.meet_at[other] < 0:
            s.behind[rank] = s.meet_waiter[other]
            s.meet_waiter[other] = rank
            return False
    return True


@kernel
def gated(p: Layout, number: int) -> bool:
    """Whether a sum goes through links that are shared, and so waits for these too."""
    gates = p.sharing.first_gate
    return bool(len(gates) and gates[number] < gates[number + 1])


@kernel
def begin_sum(s: State, number: int) -> None:
    """Wake all that wait for a sum."""
    waiter = s.sum_waiter[number]
    while waiter >= 0:
        wake(s, waiter)
        waiter = s.behind[waiter]


@kernel
def summed(p: Layout, s: State, rank: int) -> bool:
    """Go through a rank's sums; each starts when the last of its ranks has come; where it goes through shared
    links, when it is served, and is then counted as one more that has come. `part` is even where the
    rank comes to a sum, odd where it waits in it."""
    low = p.first_sum[rank]
    while low + s.part[rank] // 2 < p.first_sum[rank + 1]:
        number = p.sums[low + s.part[rank] // 2]
        if s.part[rank] % 2 == 0:
            s.part[rank] += 1
            s.sum_at[number] = max(s.sum_at[number], s.clock[rank])
            s.sum_here[number] += 1
            if s.sum_here[number] == p.sum_ranks[number]:
                if gated(p, number):
                    request(s, s.sum_at[number], len(p.kind) + number)
                else:
                    begin_sum(s, number)
        if s.sum_here[number] < p.sum_ranks[number] + gated(p, number):
            s.behind[rank] = s.sum_waiter[number]
            s.sum_waiter[number] = rank
            return False
        s.clock[rank] = s.sum_at[number] + p.sum_seconds[number]
        s.part[rank] += 1
    s.part[rank] = 0
    return True
