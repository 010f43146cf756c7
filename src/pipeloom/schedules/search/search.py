"""The search: engines round after round, with limits that grow up to those that were asked for.

Rounds with lower limits come first, at the same levels whatever the limits are, and each goes on from the
best so far: so whoever allows more memory gets what less memory gave at these levels. What was found at
limits between two levels is not searched for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from ...ir.errors import PlanError
from .bounds import Bound, lower_bound
from .candidate import Candidate, fits, one_by_one
from .engine import Round
from .problem import SearchProblem
from .registry import ENGINES
from .repeating_orders import repeating_of

LEVELS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0)
"""Limits of the rounds, in micro-batches of the rank that holds most of one."""

LARGE, SPARSEST = 1500, 4
"""Actions of a step from twice which on only every second level is taken, then every third, and at last every
fourth; and from twice which on fewer orders are tried, the more actions the fewer."""

SAME = 1e-9

SAME_FOR = 2
"""Rounds without a better order after which those up to the last are left out."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """effort: by which the orders that are tried are multiplied.  time_limit_s: after which the best so far
    is returned.  engines: by name, all unless given."""

    effort: float = 1.0
    time_limit_s: float = inf
    seed: int = 0
    engines: tuple[str, ...] = tuple(ENGINES)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is known while the search runs. cost_s: of the best, its step or its longest span, as was asked.
    evaluations: orders that were timed so far, in `seconds`."""

    cost_s: float
    bound: Bound
    evaluations: int
    seconds: float
    engine: str

    @property
    def gap(self) -> float:
        """By which share the best may at most be improved, of the bound."""
        return max(0.0, self.cost_s / self.bound.seconds - 1) if self.bound.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """best: the fastest order within the limits.  repeating: the fastest that repeats, for any number of
    micro-batches.  ended: "searched", "optimal", "time limit" or "interrupted"."""

    problem: SearchProblem = field(repr=False)
    best: Candidate
    repeating: Candidate
    progress: Progress
    ended: str


class _Search:
    def __init__(
        self, problem: SearchProblem, options: SearchOptions, report: Callable[[Progress], None]
    ) -> None:
        self.problem, self.options, self.report = problem, options, report
        self.began = time.monotonic()
        self.bound = lower_bound(problem)
        self.evaluations = 0
        self.cap = problem.arrays.cap
        first = one_by_one(problem)
        _refuse_too_little(problem, first)
        self.best = first
        self.repeating = self._repeats(first)
        self.apart: tuple[Candidate, ...] = ()

    def _repeats(self, candidate: Candidate) -> Candidate:
        found = repeating_of(self.problem, candidate)
        return found if fits(found, self.cap) else candidate

    def progress(self) -> Progress:
        cost_s = min(one.cost_s for one in (self.best, *self.apart[:1]))
        # An exact bound is one of rounded times: it may be above the step by a rounding.
        return Progress(
            cost_s=cost_s,
            bound=replace(self.bound, seconds=min(self.bound.seconds, cost_s)),
            evaluations=self.evaluations,
            seconds=time.monotonic() - self.began,
            engine=self.best.engine,
        )

    @property
    def optimal(self) -> bool:
        return self.best.cost_s <= self.bound.seconds * (1 + SAME) + SAME

    def late(self) -> bool:
        return time.monotonic() - self.began > self.options.time_limit_s

    def offer(self, candidate: Candidate) -> None:
        if candidate.cost_s < self.best.cost_s - SAME:
            self.best = candidate
            if candidate.repeating is None:
                candidate = self._repeats(candidate)
        if candidate.repeating is not None and (
            self.repeating.repeating is None or candidate.cost_s < self.repeating.cost_s - SAME
        ):
            self.repeating = candidate

    def join(self) -> None:
        """Take over what the library gave, which was kept apart from rounds with lower limits."""
        for one in self.apart:
            self.offer(one)
        self.apart = ()

    def run(self) -> str:
        for name, task in self.rounds():
            for found in ENGINES[name](task):
                self.evaluations += found.evaluations
                if found.candidate is not None:
                    self.offer(found.candidate)
                if found.bound is not None and found.bound.seconds > self.bound.seconds + SAME:
                    self.bound = found.bound
                self.report(self.progress())
                if self.optimal:
                    return "optimal"
                if self.late():
                    return "time limit"
        return "searched"

    def rounds(self) -> Iterator[tuple[str, Round]]:
        """Engine by engine, limits by limits."""
        names = self.options.engines
        levels = list(rounds_of(self.problem))
        if (
            "library" in names
        ):  # it may be optimal at once; but rounds with lower limits must not depend on it
            known, repeats = self.best, self.repeating
            yield "library", self._round(self.problem, 0, last=True)
            self.apart = self.best, self.repeating
            self.best, self.repeating = known, repeats
        reached: list[float] = []
        for number, problem in enumerate(levels):
            last = number + 1 == len(levels)
            if len(reached) > SAME_FOR and reached[-1] > reached[-1 - SAME_FOR] * (1 - SAME) and not last:
                continue  # more memory does not help
            if number:
                reached.append(self.best.cost_s)
            if last and "library" in names:
                self.join()
            for name in names:
                if name != "library":
                    yield name, self._round(problem, number, last=last)

    def _round(self, problem: SearchProblem, number: int, *, last: bool) -> Round:
        return Round(
            problem=problem,
            best=self.best,
            repeating=self.repeating,
            bound=self.bound,
            seed=self.options.seed * 1009 + number,
            effort=self.options.effort * min(1.0, 2 * LARGE / problem.entries),
            last=last,
        )


def rounds_of(problem: SearchProblem) -> Iterator[SearchProblem]:
    """The problem with lower limits, and at last as it is.

    >>> from .problem import SearchStage
    >>> stage = SearchStage(name="0", forward_s=1, input_grad_s=1, weight_grad_s=1, residual_bytes=2.0)
    >>> [p.caps for p in rounds_of(SearchProblem(stages=(stage,), microbatches=4, caps=(5.0,)))]
    [(2.0,), (3.0,), (4.0,), (5.0,)]
    """
    unit = max(problem.rank_bytes)
    most = max((cap for cap in problem.limits if cap < inf), default=inf)
    if most < inf and unit > 0:
        low = np.array(one_by_one(problem).peaks)
        sparse = min(SPARSEST, max(1, problem.entries // LARGE))
        for level in LEVELS[::sparse]:
            caps = tuple(min(cap, level * unit) for cap in problem.limits)
            if level * unit < most * (1 - SAME) and (low <= np.array(caps)).all():
                yield replace(problem, caps=caps)
    yield problem


def search_orders(
    problem: SearchProblem,
    options: SearchOptions = SearchOptions(),
    report: Callable[[Progress], None] = lambda p: None,
) -> SearchResult:
    """The fastest order that the engines find within the limits, and a bound on any.

    The same for the same seed unless a time limit or an interrupt (Ctrl-C) ends it early: then the best so
    far.
    report: called now and then.
    Raises: PlanError if no order keeps to the limits.
    """
    running = _Search(problem, options, report)
    try:
        ended = running.run()
    except KeyboardInterrupt:
        ended = "interrupted"
    running.join()
    return SearchResult(
        problem=problem,
        best=running.best,
        repeating=running.repeating,
        progress=running.progress(),
        ended=ended,
    )


def _refuse_too_little(problem: SearchProblem, first: Candidate) -> None:
    for rank, (held, cap) in enumerate(zip(first.peaks, problem.arrays.cap, strict=True)):
        if held > cap:
            raise PlanError(
                f"rank {rank} holds {held:g} for one micro-batch, its limit is {problem.limits[rank]:g}",
                hint="allow more memory, or give some of its stages to other ranks",
            )
