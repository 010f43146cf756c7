"""Repeating orders: the moments at which units run micro-batch 0, annealed.

A repeating order serves any number of micro-batches, and is what a found schedule is written as.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..candidate import OrderCandidate, Repeating, fits, new_clock
from ..clock_kernel import anneal_moments, settle
from ..engine import Found, Round
from ..problem import SearchProblem
from ..repeating_orders import moments_of, repeating_of, written

CHAINS = 3
"""Annealings of a round: from what the best order comes near, from the best repeating one, from what the two
gave."""

FEW = (2, 4, 2)
"""Micro-batches on which they anneal, in ranks: a few show what an order is worth, and soon."""

HEATS = (0.3, 0.1, 0.05)
"""Their temperatures at the start, in periods."""

TRIES = 6_000
"""Moves of one annealing; more for many units, which have more ways to move."""

MOST = 6_000_000
"""Entries that one annealing may time, so that large cases end in seconds."""

COMPILED = 1_000_000
"""Elements that a kernel is told to expect: moves are worth compiling for."""


def run(task: Round) -> Iterator[Found]:
    """Anneal on few micro-batches, then on all."""
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
    t, clock, moments = problem.arrays, new_clock(problem), moments_of(start, problem.microbatches)
    settle(t, moments, start.period)
    moments.cost[:] = 1e18
    plan = np.array([start.period, problem.microbatches, heat * start.period, 0.01 * start.period, 0.0])
    kernel = anneal_moments.form(COMPILED)
    tried = int(kernel(t, clock, moments, plan, seed, tries))
    first = moments.best if moments.cost[1] < 1e18 else moments.first
    return Repeating(first=tuple(map(float, first)), period=start.period), tried
