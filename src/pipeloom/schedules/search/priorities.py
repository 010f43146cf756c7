"""Greedy orders by priorities: of all heads of units that could begin first, the smallest key goes.

key = rank of its kind and stage, as the engine chooses, then the micro-batch
F   waits while its stage has as many micro-batches in flight as it may, or its ranks have no room
W   runs where nothing else can begin before it would end; or right behind its I

Our closest reading of the scheduler of FlexPipe, arXiv 2510.05112, of which only the abstract is known to us.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from ...ir.action import B, F, I
from ...ir.columns import Floats, Longs
from ...ir.kernels import inlined, kernel
from .moments import COMPILED
from .orders import Found, OrderCandidate, Round, fits, new_clock, timed
from .problem import EPS, SearchProblem, TimingArrays, Units, reset, run_entry


class DispatchRules(NamedTuple):
    """Per unit: its priority, smaller first; how many micro-batches it may be ahead of the last unit of its
    stage, for F.  patience: share of what could run now for which a more urgent head is waited for.  next:
    per unit its next micro-batch."""

    priority: Floats
    ahead: Floats
    patience: Floats
    last: Longs
    next: Longs


@inlined
def may_begin(t: Units, c: TimingArrays, r: DispatchRules, u: int) -> bool:
    if t.memory[u] > 0 or t.kind[u] == 0:
        if r.next[u] - r.next[r.last[u]] >= r.ahead[u]:
            return False
        for at in range(t.on_at[u], t.on_at[u + 1]):
            if c.used[t.on[at]] + t.memory[u] > t.cap[t.on[at]]:
                return False
    return True


@inlined
def earliest(t: Units, c: TimingArrays, r: DispatchRules, u: int, m: int) -> float:
    """When the head of a unit could begin; infinite before what it needs has run."""
    b, begin = r.next[u], 0.0
    for at in range(t.on_at[u], t.on_at[u + 1]):
        begin = max(begin, c.free[t.on[at]])
    for at in range(t.need_at[u], t.need_at[u + 1]):
        if r.next[t.need[at]] <= b:
            return float("inf")
        begin = max(begin, c.end[t.seen[at] * m + b] + t.delay[at])
    return begin


@kernel
def dispatch(t: Units, c: TimingArrays, r: DispatchRules, order: Longs) -> float:
    """Write an order. Returns: its seconds as `run_order` has them; infinite if the limits block it."""
    # Time: entries x units, as each place looks at the heads of all units, and twice.
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


CHANGES = 60

MOST = 150_000_000
"""Looks at units that the plain rules may take, and their changes again."""

PART = 20


def dispatch_orders(task: Round) -> Iterator[Found]:
    """All plain rules, then random changes of the best ones, rank by rank."""
    problem = task.problem
    random = np.random.default_rng(task.seed)
    order = np.zeros(len(problem.units) * problem.microbatches, np.int64)
    clock, kernel = new_clock(problem), dispatch.form(COMPILED)
    best, rules = np.inf, None
    kept = order.copy()
    tried = 0
    tries = plain_rules(problem)
    looks = len(order) * len(problem.units)
    most = max(1, round(MOST * min(1.0, task.effort)))
    stride = max(1, len(tries) * looks // most)  # of large cases only some rules
    tries = tries[task.seed % stride :: stride]
    changes = round(task.effort * min(CHANGES, most / looks))
    for number in range(len(tries) + changes):
        if number < len(tries):
            one = tries[number]
        elif rules is None:
            break
        else:
            one = changed(problem, rules, random)
        cost_s = float(kernel(problem.arrays, clock, one, order))
        tried += 1
        if cost_s < best - 1e-9 or (cost_s <= best and number >= len(tries)):
            best, rules = cost_s, one
            kept = order.copy()
        if tried == PART:
            yield Found(candidate=_checked(problem, kept, best), evaluations=tried)
            tried = 0
    yield Found(candidate=_checked(problem, kept, best), evaluations=tried)


def _checked(problem: SearchProblem, order: np.ndarray, cost_s: float) -> OrderCandidate | None:
    if cost_s == np.inf:
        return None
    found = timed(problem, order.copy(), "priorities")
    return found if fits(found, problem.arrays.cap) else None


def plain_rules(problem: SearchProblem) -> list[DispatchRules]:
    """Kind first x stage first x in flight x patience x W at once or late."""
    deep = {s: i for i, s in enumerate(problem.order_of_stages)}
    count = len(deep)
    split = any(unit.kind not in (F, B) for unit in problem.units)
    # Micro-batches that stages may have in flight: as many as keep one busy while a micro-batch comes back,
    # so many times; or any number.
    period = max(*problem.work, 1e-9)
    seconds = problem.arrays.seconds.tolist()
    turns = [ceil((tail + own) / period) for tail, own in zip(problem.tails, seconds, strict=True)]
    ahead = [[max(1.0, one * times) for one in turns] for times in (1.0, 1.5, 2.0, 3.0)]
    ahead.append([inf] * len(turns))
    last = {(u.stage, r): i for i, u in enumerate(problem.units) for r in u.ranks}
    found = []
    for backward_first, deepest_first, flight, patience, late in product(
        (True, False), (True, False), range(5), (0.0, 1.0), (True, False) if split else (True,)
    ):
        priority = []
        for unit in problem.units:
            place = -deep[unit.stage] if deepest_first else deep[unit.stage]
            kind = (unit.kind == F) == backward_first
            w = 2 if late else -1
            priority.append(place + count * (2 * kind if unit.kind in (F, B, I) else 2 * w))
        found.append(
            DispatchRules(
                priority=np.array(priority, np.float64),
                ahead=np.array(ahead[flight], np.float64),
                patience=np.array([patience]),
                last=np.array([last[u.stage, u.ranks[0]] for u in problem.units], np.int64),
                next=np.zeros(len(problem.units), np.int64),
            )
        )
    return found


def changed(problem: SearchProblem, rules: DispatchRules, random: np.random.Generator) -> DispatchRules:
    """Two priorities of one rank swapped, or one limit changed by one."""
    priority, ahead = rules.priority.copy(), rules.ahead.copy()
    patience = rules.patience.copy()
    way = random.random()
    if way < 0.5:
        rank = int(random.integers(problem.ranks))
        own = [i for i, u in enumerate(problem.units) if rank in u.ranks]
        a, b = random.choice(own, 2)
        priority[a], priority[b] = priority[b], priority[a]
    elif way < 0.9:
        forwards = [i for i, u in enumerate(problem.units) if u.kind == F]
        u = int(random.choice(forwards))
        now = ahead[u] if ahead[u] < np.inf else problem.microbatches
        ahead[u] = max(1.0, now + random.choice([-1, 1]))
    else:
        patience[0] = random.choice([0.0, 0.5, 1.0, 2.0])
    return rules._replace(priority=priority, ahead=ahead, patience=patience)
