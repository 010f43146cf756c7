"""Local search on the rows themselves: what a repeating order cannot say, at the start and at the end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..candidate import OrderCandidate, fits, new_clock, timed
from ..engine import Found, Round
from ..problem import SearchProblem
from ..rows_kernel import EVERY, RowsState, anneal_rows, time_from
from .clock import COMPILED

ENTRIES = 1_000_000
"""Entries that a round may time; an order has as many as there are units times micro-batches."""

PARTS = 2
"""Annealings of a round, each from the best so far."""


def run(task: Round) -> Iterator[Found]:
    """Anneal the order that is best so far."""
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
    """The best order on the way, and how many were timed."""
    t, clock, count = problem.arrays, new_clock(problem), len(start.order)
    places = -(-count // EVERY)
    state = RowsState(
        order=start.order.copy(),
        best=start.order.copy(),
        known=start.ends.copy(),
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
