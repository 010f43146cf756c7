"""Greedy orders by priorities: of all heads of units that could begin first, the smallest key goes.

key = rank of its kind and stage, as the engine chooses, then the micro-batch
F   waits while its stage has as many micro-batches in flight as it may, or its ranks have no room
W   runs where nothing else can begin before it would end; or right behind its I
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...ir.kernels import kernel
from .arrays import EPS, TimingArrays, Units, reset, run_entry

if TYPE_CHECKING:
    from .arrays import Floats, Ints


class DispatchRules(NamedTuple):
    """Per unit: its priority, smaller first; how many micro-batches it may be ahead of the last unit of its
    stage, for F.  patience: share of what could run now for which a more urgent head is waited for.  next:
    per unit its next micro-batch."""

    priority: Floats
    ahead: Floats
    patience: Floats
    last: Ints
    next: Ints


@kernel
def may_begin(t: Units, c: TimingArrays, r: DispatchRules, u: int) -> bool:
    """Whether limits let the head of a unit run."""
    if t.memory[u] > 0 or t.kind[u] == 0:
        if r.next[u] - r.next[r.last[u]] >= r.ahead[u]:
            return False
        for at in range(t.on_at[u], t.on_at[u + 1]):
            if c.used[t.on[at]] + t.memory[u] > t.cap[t.on[at]]:
                return False
    return True


@kernel
def earliest(t: Units, c: TimingArrays, r: DispatchRules, u: int, m: int) -> float:
    """When the head of a unit could begin; infinite before what it needs has run."""
    b, begin = r.next[u], 0.0
    for at in range(t.on_at[u], t.on_at[u + 1]):
        begin = max(begin, c.free[t.on[at]])
    for at in range(t.need_at[u], t.need_at[u + 1]):
        if r.next[t.need[at]] <= b:
            return float("inf")
        begin = max(begin, c.end[t.need[at] * m + b] + t.delay[at])
    return begin


@kernel
def dispatch(t: Units, c: TimingArrays, r: DispatchRules, order: Ints) -> float:
    """Write an order. Returns: its seconds as `run_order` has them; infinite if the limits block it."""
    reset(t, c)
    m, units, cost = t.microbatches, len(t.seconds), 0.0
    for u in range(units):
        r.next[u] = 0
    for place in range(len(order)):
        now, first = float("inf"), -1
        for u in range(units):
            if r.next[u] < m and may_begin(t, c, r, u):
                begin = earliest(t, c, r, u, m)
                if begin < now - EPS or (begin < now + EPS and r.priority[u] < r.priority[first]):
                    now, first = min(begin, now), u
        if first < 0:
            return float("inf")
        late = now + r.patience[0] * t.seconds[first]
        chosen = first
        for u in range(units):
            if t.meet[u, first] and r.priority[u] < r.priority[chosen] and r.next[u] < m:
                if may_begin(t, c, r, u) and earliest(t, c, r, u, m) <= late + EPS:
                    chosen = u
        order[place] = chosen * m + r.next[chosen]
        cost = max(cost, run_entry(t, c, chosen, r.next[chosen], m))
        r.next[chosen] += 1
    return cost
