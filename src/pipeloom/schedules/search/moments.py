"""Repeating orders: every unit has a moment at which micro-batch 0 runs, micro-batch b runs b periods later.

    unit   first   / period = turn + phase        with a period of 4: in turn k the units go by their phase,
    0F     0.0       0        0.0                 and run micro-batch k - turn, if there is one
    1F     1.0       0        0.25                turn 0:  0F0 1F0
    1B     2.0       0        0.5                 turn 1:  0F1 1F1 ...
    0B     5.0       1        0.25

So an order is sorted in the time that its units take to sort, and timed in one pass. Moments that never go
back along what units need never block: if u needs p, then (turn, phase, number) of p is less than that of u,
and so p runs micro-batch b in an earlier turn than u does, or earlier in the same one. Moments say an order
and no times: how long units take is not looked at before the order is run.

Annealing moves the moments (Kirkpatrick et al., 1983).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import exp, floor, inf, log
from typing import NamedTuple

import numpy as np

from ...ir.columns import Floats, Longs
from ...ir.kernels import kernel
from .orders import Found, OrderCandidate, Repeating, Round, fits, new_clock, timed
from .problem import EPS, SearchProblem, TimingArrays, Units, draw, excess, reset, rest, run_entry

OVER = 4.0
"""What holding twice a limit costs, in periods."""


class ClockState(NamedTuple):
    """Per unit its moment now, before the last move, and of the best so far; the units by phase.  cost: of
    now, of the best.  order: that of now, as `run_turns` wrote it.  kept: of what `cost` is of, per rank its
    units by phase, and per unit its turn.  filled: per rank, the units that were compared with that."""

    first: Floats
    before: Floats
    best: Floats
    by_phase: Longs
    turn: Longs
    phase: Floats
    cost: Floats
    order: Longs
    kept: Longs
    kept_turn: Longs
    filled: Longs


@kernel
def settle(t: Units, s: ClockState, period: float) -> None:
    """No unit before what it needs; and the units sorted by phase, equal ones by number."""
    count = len(t.seconds)
    for u in range(count):  # one pass is enough: what a unit needs has a smaller number
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
                if taken + t.tail[u] > within:  # what must follow the unit cannot be done in time
                    return within + EPS
    return cost


@kernel
def same_rows(t: Units, s: ClockState, keep: bool) -> bool:
    """Whether the rank of each unit runs what it ran before, in the same order; such an order takes as long.

    keep: whether this becomes what later ones are compared with."""
    same, count = True, len(s.turn)
    for rank in range(len(s.filled)):
        s.filled[rank] = 0
    for u in s.by_phase:
        same = same and s.kept_turn[u] == s.turn[u]
        if keep:
            s.kept_turn[u] = s.turn[u]
        for at in range(t.on_at[u], t.on_at[u + 1]):
            place = t.on[at] * count + s.filled[t.on[at]]
            s.filled[t.on[at]] += 1
            same = same and s.kept[place] == u
            if keep:
                s.kept[place] = u
    return same


@kernel
def move(t: Units, s: ClockState, period: float, seed: Longs) -> None:
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
def anneal_moments(t: Units, c: TimingArrays, s: ClockState, plan: Floats, seed: Longs, tries: int) -> int:
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
        # Metropolis: worse by d is taken with probability exp(-d / heat), that is if d <= -heat log(chance).
        # The chance is drawn first: the most that the order may cost is then known, and it is given up early.
        within = s.cost[0]
        chance = draw(seed)
        if chance > exp(-20.0):
            within -= heat * log(chance)
        else:
            within += 20.0 * heat
        heat *= cooling
        if same_rows(t, s, False):
            continue
        cost = run_turns(t, c, s, m, within)
        if cost <= within:
            cost += OVER * period * excess(t, c) + 1e-3 * rest(c)
        if cost > within:
            for u in range(len(s.first)):
                s.first[u] = s.before[u]
            continue
        s.cost[0] = cost
        same_rows(t, s, True)
        if cost < s.cost[1] - EPS:
            s.cost[1] = cost
            for u in range(len(s.first)):
                s.best[u] = s.first[u]
            if cost <= floor_s * (1 + 1e-3) + EPS and excess(t, c) == 0.0:
                return done + 1
    return tries


def moments_of(problem: SearchProblem, repeating: Repeating) -> ClockState:
    count, microbatches, ranks = len(repeating.moments), problem.microbatches, problem.ranks
    first = np.array(repeating.moments)
    return ClockState(
        first=first,
        before=first.copy(),
        best=first.copy(),
        by_phase=np.arange(count),
        turn=np.zeros(count, np.int64),
        phase=np.zeros(count),
        cost=np.zeros(2),
        order=np.zeros(count * microbatches, np.int64),
        kept=np.full(count * ranks, -1),
        kept_turn=np.zeros(count, np.int64),
        filled=np.zeros(ranks, np.int64),
    )


def written(problem: SearchProblem, repeating: Repeating, engine: str) -> OrderCandidate:
    t, m = problem.arrays, problem.microbatches
    moments = moments_of(problem, repeating)
    settle(t, moments, repeating.period)
    run_turns(t, new_clock(problem), moments, m, inf)
    return timed(problem, moments.order, engine, repeating)


def repeating_of(problem: SearchProblem, candidate: OrderCandidate) -> OrderCandidate:
    """The best of the repeating orders that an order comes near; it may break limits that the order keeps.

    What runs around one moment is taken as a turn of it: of every unit the micro-batch that runs then.
    Around the middle of the step an order such as 1F1B has its steady state.
    """
    if candidate.repeating is not None:
        return candidate
    m, seconds = problem.microbatches, problem.arrays.seconds
    starts = candidate.ends.reshape(-1, m) - seconds[:, None]
    low, high = m // 4, max(m // 4 + 1, 3 * m // 4)
    pace = float((starts[:, min(high, m - 1)] - starts[:, low]).mean()) / max(min(high, m - 1) - low, 1)
    tries: list[OrderCandidate] = []
    for period in sorted({max(problem.work), max(*problem.work, pace)}):
        period = max(period, 1e-9)
        for share in (0.5, 0.4, 0.6, 0.3, 0.7):
            # Of each unit the micro-batch that begins nearest to that time; then back to micro-batch 0:
            #
            #     0F  |0|1|2|3|4|5|           at the mark 0F runs micro-batch 4, 0B micro-batch 1, so that
            #     0B        |0 |1 |2 |        their moments are start(0F4) - 4 periods, start(0B1) - 1 period
            #                  ^
            batch = np.argmin(np.abs(starts - share * candidate.step_s), axis=1)
            first = starts[np.arange(len(batch)), batch] - batch * period
            moments = Repeating(moments=tuple(map(float, first - first.min())), period=period)
            tries.append(written(problem, moments, candidate.engine))
    cap = problem.arrays.cap
    return min(tries, key=lambda one: (not fits(one, cap), one.cost_s))


CHAINS = 3
"""Annealings of a round: from what the best order comes near, from the best repeating one, from what the two
gave."""

FEW = (2, 4, 2)
"""Micro-batches on which they anneal, in ranks: a few show what an order is worth, and soon."""

HEATS = (0.3, 0.1, 0.05)

TRIES = 6_000
"""Moves of one annealing; more for many units, which have more ways to move."""

MOST = 6_000_000
"""Entries that one annealing may time, so that large cases end in seconds."""

COMPILED = 1_000_000
"""Elements that a kernel is told to expect: moves are worth compiling for."""


def anneal_repeating(task: Round) -> Iterator[Found]:
    problem, m = task.problem, task.problem.microbatches
    units = len(problem.units)
    near = repeating_of(problem, task.best)
    starts = [near.repeating, task.repeating.repeating, None]
    best: OrderCandidate | None = None
    for chain in range(CHAINS):
        few = min(m, max(16, FEW[chain] * problem.ranks))
        small = replace(problem, microbatches=few) if few < m else problem
        tries = round(task.effort * min(TRIES * max(1.0, units / 12) ** 2, MOST / (units * few)))
        start = starts[chain] or (best or near).repeating
        assert start is not None
        seed = np.array([1 + (task.seed * 7919 + chain * 104_729 + 17) % 2_000_000_011], np.int64)
        moments, tried = anneal(small, start, seed, HEATS[chain], tries)
        found = written(problem, moments, "clock")
        if small is not problem:
            moments, more = anneal(problem, moments, seed, 0.02, tries // 6)
            found, tried = written(problem, moments, "clock"), tried + more
        good = fits(found, problem.arrays.cap)
        if good and (best is None or found.cost_s < best.cost_s):
            best = found
        yield Found(candidate=found if good else None, evaluations=tried)


def anneal(
    problem: SearchProblem, start: Repeating, seed: np.ndarray, heat: float, tries: int
) -> tuple[Repeating, int]:
    """The best moments on the way, and how many orders were timed. heat: in periods."""
    t, clock, moments = problem.arrays, new_clock(problem), moments_of(problem, start)
    settle(t, moments, start.period)
    moments.cost[:] = 1e18
    plan = np.array([start.period, problem.microbatches, heat * start.period, 0.01 * start.period, 0.0])
    kernel = anneal_moments.form(COMPILED)
    tried = int(kernel(t, clock, moments, plan, seed, tries))
    first = moments.best if moments.cost[1] < 1e18 else moments.first
    return Repeating(moments=tuple(map(float, first)), period=start.period), tried
