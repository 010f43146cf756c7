"""Repeating orders: every unit has a moment at which micro-batch 0 runs, micro-batch b runs b periods later.

    unit   first   / period = turn + phase        with a period of 4: in turn k the units go by their phase,
    0F     0.0       0        0.0                 and run micro-batch k - turn, if there is one
    1F     1.0       0        0.25                turn 0:  0F0 1F0
    1B     2.0       0        0.5                 turn 1:  0F1 1F1 ...
    0B     5.0       1        0.25

So an order is sorted in the time that its units take to sort, and timed in one pass. ClockState that never go
back along what units need never block. Annealing moves the moments (Kirkpatrick et al., 1983).
"""

from __future__ import annotations

from math import exp, floor, log
from typing import TYPE_CHECKING, NamedTuple

from ...ir.kernels import kernel
from .arrays import EPS, TimingArrays, Units, draw, excess, reset, rest, run_entry

if TYPE_CHECKING:
    from .arrays import Floats, Ints

OVER = 4.0
"""What holding twice a limit costs, in periods."""


class ClockState(NamedTuple):
    """Per unit: now, before the last move, and of the best so far; the units by phase, and their turns;
    costs: of now, of the best.  order: that of now, as `run_turns` wrote it."""

    first: Floats
    before: Floats
    best: Floats
    by_phase: Ints
    turn: Ints
    phase: Floats
    cost: Floats
    order: Ints


@kernel
def settle(t: Units, s: ClockState, period: float) -> None:
    """No unit before what it needs; and the units sorted by phase, equal ones by number."""
    count = len(t.seconds)
    for u in range(count):
        for at in range(t.need_at[u], t.need_at[u + 1]):
            s.first[u] = max(s.first[u], s.first[t.need[at]])
        s.turn[u] = floor(s.first[u] / period)
        s.phase[u] = s.first[u] - s.turn[u] * period
    for i in range(1, count):  # insertion sort: moves change little
        u = s.by_phase[i]
        at = i
        while at > 0:
            other = s.by_phase[at - 1]
            if s.phase[other] < s.phase[u] or (s.phase[other] == s.phase[u] and other < u):
                break
            s.by_phase[at] = other
            at -= 1
        s.by_phase[at] = u


@kernel
def run_turns(t: Units, c: TimingArrays, s: ClockState, m: int, within: float) -> float:
    """Write and time the order of m micro-batches. Returns: its seconds as `run_order` has them, or something
    longer than `within` once that is certain."""
    reset(t, c)
    low, high = s.turn[0], s.turn[0]
    for u in range(len(s.turn)):
        low, high = min(low, s.turn[u]), max(high, s.turn[u])
    cost, place = 0.0, 0
    for k in range(low, high + m):
        for u in s.by_phase:
            b = k - s.turn[u]
            if b >= 0 and b < m:
                s.order[place] = u * m + b
                place += 1
                taken = run_entry(t, c, u, b, m)
                cost = max(cost, taken)
                if taken + t.tail[u] > within:
                    return within + EPS
    return cost


@kernel
def move(t: Units, s: ClockState, period: float, seed: Ints) -> None:
    """Change a moment; or that of all later ones; or swap two; or let one run a whole period sooner or
    later."""
    count = len(s.first)
    u = min(int(draw(seed) * count), count - 1)
    way = draw(seed)
    far = (draw(seed) + draw(seed) - 1.0) * period
    if way < 0.4:
        s.first[u] += far * (1.0 if draw(seed) < 0.4 else 0.2)
    elif way < 0.6:
        from_on = s.first[u]
        for v in range(count):
            if s.first[v] >= from_on:
                s.first[v] += far * 0.5
    elif way < 0.85:
        v = min(int(draw(seed) * count), count - 1)
        difference = s.phase[v] - s.phase[u]
        s.first[u] += difference
        s.first[v] -= difference
    else:
        s.first[u] += period if draw(seed) < 0.5 else -period


@kernel
def anneal_moments(t: Units, c: TimingArrays, s: ClockState, plan: Floats, seed: Ints, tries: int) -> int:
    """Move the moments so many times. plan: the period, the micro-batches, the temperature at the start and
    at the end, a step that cannot be bettered. Returns: how many orders were timed."""
    period, m, floor_s = plan[0], int(plan[1]), plan[4]
    cooling = (plan[3] / plan[2]) ** (1.0 / max(tries, 1))
    heat = plan[2]
    for done in range(tries):
        for u in range(len(s.first)):
            s.before[u] = s.first[u]
        move(t, s, period, seed)
        settle(t, s, period)
        # Metropolis: worse by d is taken with probability exp(-d / heat), so the most it may cost is known.
        within = s.cost[0]
        chance = draw(seed)
        if chance > exp(-20.0):
            within -= heat * log(chance)
        else:
            within += 20.0 * heat
        cost = run_turns(t, c, s, m, within)
        if cost <= within:
            cost += OVER * period * excess(t, c) + 1e-3 * rest(c)
        heat *= cooling
        if cost > within:
            for u in range(len(s.first)):
                s.first[u] = s.before[u]
            continue
        s.cost[0] = cost
        if cost < s.cost[1] - EPS:
            s.cost[1] = cost
            for u in range(len(s.first)):
                s.best[u] = s.first[u]
            if cost <= floor_s * (1 + 1e-3) + EPS and excess(t, c) == 0.0:
                return done + 1
    return tries
