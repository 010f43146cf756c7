"""Candidates: orders that engines find, and what they are compared by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .arrays import TimingArrays, run_order
from .problem import SearchProblem

if TYPE_CHECKING:
    from .arrays import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Repeating:
    """A repeating order: per unit when micro-batch 0 runs it, in units of `period`."""

    first: tuple[float, ...]
    period: float


@dataclass(frozen=True, kw_only=True)
class OrderCandidate:
    """An order of everything, timed.

    order: see `arrays`.  step_s: of it.  cost_s: what the search makes short, the step or the longest span of
        a rank.  peaks: bytes of residuals per rank.  ends: per entry.
    engine: who found it.  repeating: the moments that it follows, if it does.
    """

    order: Ints = field(repr=False)
    step_s: float
    cost_s: float
    peaks: tuple[float, ...]
    ends: Floats = field(repr=False)
    engine: str
    repeating: Repeating | None = None


def new_clock(problem: SearchProblem) -> TimingArrays:
    ranks = problem.ranks
    return TimingArrays(
        end=np.zeros(len(problem.units) * problem.microbatches),
        free=np.zeros(ranks),
        used=np.zeros(ranks),
        peak=np.zeros(ranks),
        began=np.zeros(ranks),
    )


def timed(
    problem: SearchProblem, order: Ints, engine: str, repeating: Repeating | None = None
) -> OrderCandidate:
    """An order with its times."""
    clock = new_clock(problem)
    cost_s = float(run_order(problem.arrays, clock, order))
    return OrderCandidate(
        order=order,
        step_s=float(clock.free.max()),
        cost_s=cost_s,
        peaks=tuple(map(float, clock.peak)),
        ends=clock.end,
        engine=engine,
        repeating=repeating,
    )


def fits(candidate: OrderCandidate, caps: Floats) -> bool:
    """Whether it keeps to the limits."""
    return bool((np.array(candidate.peaks) <= caps).all())


def one_by_one(problem: SearchProblem) -> OrderCandidate:
    """One micro-batch after the other: nothing needs less memory. Parts that exchange nothing go one after
    the other, too."""
    m = problem.microbatches
    units = range(len(problem.units))
    order = [
        u * m + b for own in problem.parts for b in range(m) for u in units if problem.units[u].stage in own
    ]
    return timed(problem, np.array(order, np.int64), "one by one")
