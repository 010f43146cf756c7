"""What engines are given, and what they give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .bounds import Bound
from .candidate import OrderCandidate
from .problem import SearchProblem


@dataclass(frozen=True, kw_only=True)
class Round:
    """problem: with the limits of this round.  best: what is known and keeps to them.  repeating: the best
    that repeats, if it has `repeating`.  bound: of this problem.  seed: of random moves.  effort: by which
    orders that are tried are multiplied.  without_limits: by name the schedules of the library as they are
    without limits."""

    problem: SearchProblem
    best: OrderCandidate
    repeating: OrderCandidate
    bound: Bound
    seed: int
    effort: float
    without_limits: Mapping[str, OrderCandidate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A candidate, if there is one that keeps to the limits, how many orders were timed for it, and what it
    proves."""

    candidate: OrderCandidate | None
    evaluations: int
    bound: Bound | None = None


Engine: TypeAlias = Callable[[Round], Iterator[Found]]
"""Yields after every part of its work, a few hundredths of a second: between two of them the search may
end."""
