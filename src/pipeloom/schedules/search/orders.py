"""Orders that engines find, what they are compared by, and what engines are given and give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ...ir.columns import Floats, Longs
from .bounds import Bound
from .problem import SearchProblem
from .timing import TimingArrays, run_order


@dataclass(frozen=True, kw_only=True)
class Repeating:
    """A repeating order: per unit when micro-batch 0 runs it, in units of `period`."""

    first: tuple[float, ...]
    period: float


@dataclass(frozen=True, kw_only=True)
class OrderCandidate:
    """An order of everything, timed: see `timing`. cost_s: what the search makes short, the step or the
    longest span of a rank.  peaks: bytes per rank.  ends: per entry.  engine: who found it."""

    order: Longs = field(repr=False)
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
    problem: SearchProblem, order: Longs, engine: str, repeating: Repeating | None = None
) -> OrderCandidate:
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


@dataclass(frozen=True, kw_only=True)
class Round:
    """What an engine is given. problem: with the limits of this round.  best: known, within them.  repeating:
    the best that repeats, if it has `repeating`.  without_limits: by name the library's schedules without
    limits."""

    problem: SearchProblem
    best: OrderCandidate
    repeating: OrderCandidate
    bound: Bound
    seed: int
    effort: float
    without_limits: Mapping[str, OrderCandidate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A candidate that keeps to the limits, how many orders were timed for it, and what it proves."""

    candidate: OrderCandidate | None
    evaluations: int
    bound: Bound | None = None


Engine: TypeAlias = Callable[[Round], Iterator[Found]]
"""Yields after every part of its work, a few hundredths of a second: between two of them the search may
end."""
