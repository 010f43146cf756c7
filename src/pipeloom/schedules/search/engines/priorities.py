"""Priorities: per rank which kind goes first, which of its stages first, and how many micro-batches may be in
flight. Our closest reading of the scheduler of FlexPipe, arXiv 2510.05112, of which only the abstract is
known to us."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, inf

import numpy as np

from ....ir.action import B, F, I
from ..candidate import OrderCandidate, fits, new_clock, timed
from ..dispatch_kernel import DispatchRules, dispatch
from ..engine import Found, Round
from ..problem import SearchProblem
from .clock import COMPILED

CHANGES = 60
"""Random changes of the best rules."""

MOST = 150_000_000
"""Looks at units that the plain rules may take, and their changes again."""

PART = 20
"""Orders between two places at which the search may end."""


def run(task: Round) -> Iterator[Found]:
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
    ahead = [_ahead(problem, flight) for flight in range(5)]
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
        found.append(rules_of(problem, priority, ahead[flight], patience))
    return found


def _ahead(problem: SearchProblem, flight: int) -> list[float]:
    """Micro-batches that stages may have in flight, per unit: as many as keep one busy while a micro-batch
    comes back, so many times; or any number."""
    units = range(len(problem.units))
    if flight == 4:
        return [inf for _ in units]
    period = max(*problem.work, 1e-9)
    seconds = problem.arrays.seconds
    back = [problem.tails[u] + float(seconds[u]) for u in units]
    return [max(1.0, ceil(one / period) * (1.0, 1.5, 2.0, 3.0)[flight]) for one in back]


def rules_of(
    problem: SearchProblem, priority: Sequence[float], ahead: Sequence[float], patience: float
) -> DispatchRules:
    last = {(u.stage, r): i for i, u in enumerate(problem.units) for r in u.ranks}
    return DispatchRules(
        priority=np.array(priority, np.float64),
        ahead=np.array(ahead, np.float64),
        patience=np.array([patience]),
        last=np.array([last[u.stage, u.ranks[0]] for u in problem.units], np.int64),
        next=np.zeros(len(problem.units), np.int64),
    )


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
    return DispatchRules(priority=priority, ahead=ahead, patience=patience, last=rules.last, next=rules.next)
