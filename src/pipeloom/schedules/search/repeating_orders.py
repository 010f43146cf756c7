"""Repeating orders written out for all micro-batches, and found in orders that do not quite repeat."""

from __future__ import annotations

from math import inf

import numpy as np

from .candidate import OrderCandidate, Repeating, fits, new_clock, timed
from .clock_kernel import ClockState, run_turns, settle
from .problem import SearchProblem


def moments_of(repeating: Repeating, microbatches: int) -> ClockState:
    count = len(repeating.first)
    first = np.array(repeating.first)
    return ClockState(
        first=first,
        before=first.copy(),
        best=first.copy(),
        by_phase=np.arange(count),
        turn=np.zeros(count, np.int64),
        phase=np.zeros(count),
        cost=np.zeros(2),
        order=np.zeros(count * microbatches, np.int64),
    )


def written(problem: SearchProblem, repeating: Repeating, engine: str) -> OrderCandidate:
    """The order of a repeating order for all micro-batches, timed."""
    t, m = problem.arrays, problem.microbatches
    moments = moments_of(repeating, m)
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
            batch = np.argmin(np.abs(starts - share * candidate.step_s), axis=1)
            first = starts[np.arange(len(batch)), batch] - batch * period
            moments = Repeating(first=tuple(map(float, first - first.min())), period=period)
            tries.append(written(problem, moments, candidate.engine))
    cap = problem.arrays.cap
    return min(tries, key=lambda one: (not fits(one, cap), one.cost_s))
