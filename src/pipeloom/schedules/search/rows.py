"""Local search on rows: one entry of an order moves past a few others that share a rank with it.

Only what stands from the first changed place on is timed again, from a snapshot of the ranks at that place,
and only until it is certain that the step becomes too long.

    places      0 ......... 16 ......... 32 ......... 48         a snapshot in front of every 16th
    changed                        24 -> 40
    timed                   16 -----------------------------> until the end, or until it takes too long

So a move costs about half as much as timing the whole order, or less where it is given up. Ends of entries in
front of the snapshot stay as they are; those behind it are put back (from `known`) if a move is not taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import NamedTuple

import numpy as np

from ...ir.columns import Floats, Longs
from ...ir.kernels import kernel
from .moments import COMPILED
from .orders import Found, OrderCandidate, Round, fits, new_clock, timed
from .problem import EPS, SearchProblem, TimingArrays, Units, draw, run_entry

EVERY = 16


class RowsState(NamedTuple):
    """known: ends as of now.  link to longest: snapshots of links and ranks, one per `EVERY` places.  cost:
    of now, of best."""

    order: Longs
    best: Longs
    known: Floats
    link: Floats
    free: Floats
    used: Floats
    peak: Floats
    began: Floats
    longest: Floats
    cost: Floats


@kernel
def take(s: RowsState, c: TimingArrays, number: int, longest: float) -> None:
    ranks, links = len(c.free), len(c.link)
    for link in range(links):
        s.link[number * links + link] = c.link[link]
    for rank in range(ranks):
        s.free[number * ranks + rank] = c.free[rank]
        s.used[number * ranks + rank] = c.used[rank]
        s.peak[number * ranks + rank] = c.peak[rank]
        s.began[number * ranks + rank] = c.began[rank]
    s.longest[number] = longest


@kernel
def time_from(t: Units, c: TimingArrays, s: RowsState, low: int, within: float, write: bool) -> float:
    """Time the order from place `low` on; what stands before it is as it was. Returns: its cost, infinite
    where a limit is broken, or something longer than `within`."""
    m, ranks, links, number = t.microbatches, len(c.free), len(c.link), low // EVERY
    for link in range(links):
        c.link[link] = s.link[number * links + link]
    for rank in range(ranks):
        c.free[rank] = s.free[number * ranks + rank]
        c.used[rank] = s.used[number * ranks + rank]
        c.peak[rank] = s.peak[number * ranks + rank]
        c.began[rank] = s.began[number * ranks + rank]
    longest = s.longest[number]
    for at in range(number * EVERY, len(s.order)):
        if write and at % EVERY == 0:
            take(s, c, at // EVERY, longest)
        entry = s.order[at]
        u = entry // m
        taken = run_entry(t, c, u, entry % m, m)
        longest = max(longest, taken)
        if taken + t.tail[u] > within:
            return within + EPS
        if t.memory[u] > 0:
            for on in range(t.on_at[u], t.on_at[u + 1]):
                if c.used[t.on[on]] > t.cap[t.on[on]]:
                    return float("inf")
    # Of equally long orders that whose ranks end earlier on average: the slope that leads off a plateau.
    total = 0.0
    for rank in range(ranks):
        total += c.free[rank]
    cost: float = longest + 1e-3 * total / ranks
    return cost


@kernel
def needs_it(t: Units, user: int, maker: int) -> bool:
    if user == maker:
        return True
    for at in range(t.need_at[user], t.need_at[user + 1]):
        if t.need[at] == maker:
            return True
    return False


@kernel
def target_of(t: Units, s: RowsState, place: int, past: int, later: bool) -> int:
    """Where an entry comes to stand that goes past so many others on its ranks, as far as needs let it."""
    m = t.microbatches
    u, b = s.order[place] // m, s.order[place] % m
    at = place
    while past > 0:
        then = at + 1 if later else at - 1
        if then < 0 or then >= len(s.order):
            return at
        v, other_b = s.order[then] // m, s.order[then] % m
        # Micro-batches of a unit keep their order: they are alike, so that swapping two gains nothing.
        if u == v:
            return at
        if b == other_b and (needs_it(t, v, u) if later else needs_it(t, u, v)):
            return at
        if t.meet[u, v]:  # to pass what runs on other ranks changes no row, and is free
            past -= 1
        at = then
    return at


@kernel
def shift(s: RowsState, place: int, target: int) -> None:
    entry, at = s.order[place], place
    while at < target:
        s.order[at] = s.order[at + 1]
        at += 1
    while at > target:
        s.order[at] = s.order[at - 1]
        at -= 1
    s.order[target] = entry


@kernel
def anneal_rows(t: Units, c: TimingArrays, s: RowsState, plan: Floats, seed: Longs, tries: int) -> int:
    """Try so many moves. plan: the temperature at the start and at the end, a step that cannot be bettered.

    Returns: how many orders were timed.
    """
    heat, timed = plan[0], 0
    cooling = (plan[1] / plan[0]) ** (1.0 / max(tries, 1))
    count = len(s.order)
    for _ in range(tries):
        heat *= cooling
        place = min(int(draw(seed) * count), count - 1)
        later = draw(seed) < 0.5
        past = 1 + int(draw(seed) * draw(seed) * 8.0)
        target = target_of(t, s, place, past, later)
        if target == place:
            continue
        shift(s, place, target)
        low = min(place, target)
        within = s.cost[0] - heat * log(max(draw(seed), 1e-9))
        cost = time_from(t, c, s, low, within, False)
        timed += 1
        if cost > within:
            shift(s, target, place)
            for at in range(low // EVERY * EVERY, count):
                c.end[s.order[at]] = s.known[s.order[at]]
            for at in range(count, len(c.end)):
                c.end[at] = s.known[at]
            continue
        time_from(t, c, s, low, float("inf"), True)
        s.cost[0] = cost
        for at in range(low // EVERY * EVERY, count):
            s.known[s.order[at]] = c.end[s.order[at]]
        for at in range(count, len(c.end)):
            s.known[at] = c.end[at]
        if cost < s.cost[1] - EPS:
            s.cost[1] = cost
            for at in range(count):
                s.best[at] = s.order[at]
            if cost <= plan[2] * (1 + 1e-3) + EPS:
                return timed
    return timed


ENTRIES = 1_000_000

PARTS = 2


def anneal_best(task: Round) -> Iterator[Found]:
    problem, best = task.problem, task.best
    tries = round(ENTRIES * task.effort / len(best.order) / PARTS)
    for part in range(PARTS):
        seed = np.array([1 + (task.seed * 6101 + part * 7907 + 5) % 2_000_000_011], np.int64)
        order, tried = anneal(problem, best, seed, task.bound.seconds, tries)
        found = timed(problem, order, "rows")
        if found.cost_s < best.cost_s - 1e-9 and fits(found, problem.arrays.cap):
            best = found
        yield Found(candidate=best, evaluations=tried)


def anneal(
    problem: SearchProblem, start: OrderCandidate, seed: np.ndarray, bound_s: float, tries: int
) -> tuple[np.ndarray, int]:
    t, clock, count = problem.arrays, new_clock(problem), len(start.order)
    places = -(-count // EVERY)
    state = RowsState(
        order=start.order.copy(),
        best=start.order.copy(),
        known=np.zeros(len(clock.end)),
        link=np.zeros(places * len(clock.link)),
        free=np.zeros(places * problem.ranks),
        used=np.zeros(places * problem.ranks),
        peak=np.zeros(places * problem.ranks),
        began=np.full(places * problem.ranks, -1.0 if problem.arrays.span else 0.0),
        longest=np.zeros(places),
        cost=np.zeros(2),
    )
    kernel = time_from.form(COMPILED)
    state.cost[:] = kernel(t, clock, state, 0, float("inf"), True)
    state.known[:] = clock.end
    pace = max(problem.work)
    plan = np.array([0.05 * pace, 0.001 * pace, bound_s])
    tried = int(anneal_rows.form(COMPILED)(t, clock, state, plan, seed, tries))
    return state.best, tried
