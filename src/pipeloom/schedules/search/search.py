"""The search: engines round after round, with limits that grow up to those that were asked for.

More memory gives what less memory gave, as what is looked at within some limits is looked at within larger
ones, too, where all grow by the same factor:

    climb    rounds at the sizes of `Levels` that are within the limits, from the smallest one on, each going
             on from the best so far: nothing in a round depends on a size above its own
    library  what its schedules are without knowing limits, which is the same for all; and what they make of
             each of the sizes of `Levels.thorough`, each by itself

Two things are looked at within the very limits only, so that no order of theirs is missed: what the library
makes of them, and small cases by CP-SAT. Of all that the shortest is taken.

Sizes are bytes of the rank with the largest limit; the other ranks get their share of it, so that all limits
grow together. Where all stages hold multiples of the same bytes, so are the sizes: between two multiples
nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf, log2

from ...ir.errors import PlanError
from . import exact, library, moments, priorities, rows
from .moments import repeating_of
from .orders import Bound, Engine, OrderCandidate, Round, fits, lower_bound, one_by_one
from .problem import SearchProblem

ENGINES: dict[str, Engine] = {
    "library": library.library_orders,
    "priorities": priorities.dispatch_orders,
    "clock": moments.anneal_repeating,
    "rows": rows.anneal_best,
    "exact": exact.solve_orders,
}
"""In the order in which they run: later ones go on from what earlier ones found."""

LARGE_SEARCH = 1500
"""Actions of a step from twice which on fewer orders are tried, the more actions the fewer."""

QUICK, SLOW, FIRST = 7.0, 0.55, 0.25
"""Effort while sizes double: of `priorities` and `rows`, which run at every size, and of `clock`, which runs
at thorough ones; and doublings that the smallest size counts for. No round has more than all of what is asked
for."""

POLISH = 0.5
"""Effort of the local search that goes on from the library, of what is asked for."""

FLAT, SPARSE = 2.0, 1.5
"""By which sizes have grown without a shorter order where the next ones are further apart, and by which."""

LONGER, FEW = 1.02, 2
"""By which the best of the library must be longer than without limits for sizes between two thorough ones to
be tried, and how many of its schedules are, the best ones."""

EVERY = 2
"""Of the thorough sizes for which the library is built."""

LIBRARY = "library: "


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """effort: by which the orders that are tried are multiplied.  time_limit_s: after which the best so far
    is returned.  sizes: whether the library is built for smaller limits, too, which takes long."""

    effort: float = 1.0
    time_limit_s: float = inf
    seed: int = 0
    engines: tuple[str, ...] = tuple(ENGINES)
    sizes: bool = True


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is known while the search runs. cost_s: of the best, its step or its longest span.  evaluations:
    orders that were timed so far, in `seconds`."""

    cost_s: float
    bound: Bound
    evaluations: int
    seconds: float
    engine: str

    @property
    def gap(self) -> float:
        return max(0.0, self.cost_s / self.bound.seconds - 1) if self.bound.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """repeating: the fastest order that repeats, for any number of micro-batches.  ended: "searched",
    "optimal", "time limit" or "interrupted"."""

    problem: SearchProblem = field(repr=False)
    best: OrderCandidate
    repeating: OrderCandidate
    progress: Progress
    ended: str


class _Known:
    """The best of some orders, and the best that repeats, within the limits of a problem."""

    def __init__(self, problem: SearchProblem, first: OrderCandidate) -> None:
        self.problem, self.best = problem, first
        self.repeating = self._repeats(first)
        self.library: dict[str, float] = {}  # seconds by name

    def _repeats(self, candidate: OrderCandidate) -> OrderCandidate:
        found = repeating_of(self.problem, candidate)
        return found if fits(found, self.problem.arrays.cap) else candidate

    def offer(self, candidate: OrderCandidate) -> None:
        if candidate.engine.startswith(LIBRARY):
            self.library[candidate.engine.removeprefix(LIBRARY)] = candidate.cost_s
        if candidate.cost_s < self.best.cost_s - SAME:
            self.best = candidate
            if candidate.repeating is None:
                candidate = self._repeats(candidate)
        if candidate.repeating is not None and (
            self.repeating.repeating is None or candidate.cost_s < self.repeating.cost_s - SAME
        ):
            self.repeating = candidate


@dataclass(kw_only=True)
class _Climb:
    """gained: the last size that gave a shorter order, or below which memory set the pace.  thorough: the
    next size at which `clock` runs.  grown, due: doublings since the round before, and since such a size."""

    size: float
    gained: float
    thorough: float
    grown: float
    due: float
    number: int = 0

    def tasks(self, engines: tuple[str, ...]) -> Iterator[tuple[str, float]]:
        """Engines and their efforts at this size."""
        for name in engines:
            if name in ("priorities", "rows"):
                yield name, min(1.0, QUICK * self.grown)
            elif name == "clock" and self.size >= self.thorough:
                yield name, min(1.0, SLOW * self.due) * (0.25 if self.size > SPARSE * self.gained else 1.0)

    def go_on(self, levels: Levels) -> None:
        if self.size >= self.thorough:
            self.thorough, self.due = levels.after_thorough(self.size), 0.0
        last, flat = self.size, self.size >= FLAT * self.gained
        self.size = levels.above(last, SPARSE if flat else levels.fine)
        self.grown = log2(self.size / last) if last and self.size < inf else 0.0
        self.due += self.grown
        self.number += 1


class _Search:
    def __init__(
        self, problem: SearchProblem, options: SearchOptions, report: Callable[[Progress], None]
    ) -> None:
        self.problem, self.options, self.report = problem, options, report
        self.began = time.monotonic()
        self.bound = lower_bound(problem)
        self.evaluations = 0
        self.first = one_by_one(problem)
        for rank, (held, cap) in enumerate(zip(self.first.peaks, problem.arrays.cap, strict=True)):
            if held > cap:
                raise PlanError(
                    f"rank {rank} holds {problem.shown_size(held)} for one micro-batch, its limit is "
                    f"{problem.shown_size(problem.limits[rank])}",
                    hint="allow more memory, or give some of its stages to other ranks",
                )
        self.levels = levels_of(problem)
        self.known = _Known(problem, self.first)
        self.without_limits: dict[str, OrderCandidate] = {}

    @property
    def best(self) -> OrderCandidate:
        return self.known.best

    def progress(self) -> Progress:
        # An exact bound is one of rounded times: it may be above the step by a rounding.
        return Progress(
            cost_s=self.best.cost_s,
            bound=replace(self.bound, seconds=min(self.bound.seconds, self.best.cost_s)),
            evaluations=self.evaluations,
            seconds=time.monotonic() - self.began,
            engine=self.best.engine,
        )

    @property
    def optimal(self) -> bool:
        return self.best.cost_s <= self.bound.seconds * (1 + SAME) + SAME

    def run(self) -> str:
        for name, task, known in self.rounds():
            for found in ENGINES[name](task):
                self.evaluations += found.evaluations
                if found.candidate is not None:
                    self._take(found.candidate, known)
                if found.bound is not None and found.bound.seconds > self.bound.seconds + SAME:
                    self.bound = found.bound
                self.report(self.progress())
                if self.optimal:
                    return "optimal"
                if time.monotonic() - self.began > self.options.time_limit_s:
                    return "time limit"
        return "searched"

    def _take(self, candidate: OrderCandidate, known: _Known | None) -> None:
        if known is not None:
            known.offer(candidate)
        else:
            self.without_limits[candidate.engine.removeprefix(LIBRARY)] = candidate
        if fits(candidate, self.problem.arrays.cap):
            self.known.offer(candidate)

    def rounds(self) -> Iterator[tuple[str, Round, _Known | None]]:
        """Engine, its task, and what takes its orders: those without limits are kept by name."""
        names = self.options.engines
        numbers = range(0, len(self.levels.thorough()), EVERY)[::-1]
        if "library" in names:
            free = _Known(self.problem.within(()), self.first)
            yield "library", self._round(free, 0, 1.0), None
            cap = self.problem.arrays.cap
            if not all(fits(one, cap) for one in self.without_limits.values()):
                yield "library", self._round(self.known, 0, 1.0), self.known
        yield from self._climb()
        if "library" in names and self.options.sizes:
            for number in numbers:
                yield from self._library(number)
        if "exact" in names:
            yield "exact", self._round(self.known, 0, 1.0), None

    def _library(self, number: int) -> Iterator[tuple[str, Round, _Known]]:
        """What the library makes of a thorough size, and the best of that of the sizes up to the next one
        where memory makes steps longer; each time local search from the best."""
        sizes = self.levels.from_thorough(number)
        if self.levels.top == 0 or not self.without_limits or self._in_vain(sizes[-1]):
            return
        known = _Known(self.levels.at(sizes[0]), self.first)
        yield from self._made(known, number, self._unlike())
        best = sorted(known.library, key=lambda name: known.library[name])[:FEW]
        least = min(one.cost_s for one in self.without_limits.values())
        if not best or known.library[best[0]] <= least * LONGER:
            return
        few = {name: self.without_limits[name] for name in best}
        for size in sizes[1:]:
            if not self._in_vain(size):
                yield from self._made(_Known(self.levels.at(size), known.best), number, few)

    def _unlike(self) -> dict[str, OrderCandidate]:
        """The library's orders without limits, of such that take and hold alike the first."""
        alike = {(one.cost_s, one.peaks): name for name, one in reversed(self.without_limits.items())}
        return {name: one for name, one in self.without_limits.items() if name in alike.values()}

    def _in_vain(self, size: float) -> bool:
        """Whether nothing within the limits of a size can be shorter than what is known."""
        return lower_bound(self.levels.at(size)).seconds >= self.best.cost_s

    def _made(
        self, known: _Known, number: int, names: Mapping[str, OrderCandidate]
    ) -> Iterator[tuple[str, Round, _Known]]:
        before = known.best
        yield "library", replace(self._round(known, number, 1.0), without_limits=names), known
        if "rows" in self.options.engines and known.best is not before:
            yield "rows", self._round(known, number, POLISH), known

    def _climb(self) -> Iterator[tuple[str, Round, _Known]]:
        levels, low = self.levels, self.levels.low
        first = FIRST if low < levels.top else 1.0 / SLOW
        at = _Climb(size=low, gained=low, thorough=low, grown=first, due=first)
        known = _Known(levels.at(low), self.first)
        while at.size <= levels.asked:
            known.problem, reached = levels.at(at.size), known.best
            for one in self.without_limits.values():
                if fits(one, known.problem.arrays.cap):
                    known.offer(one)
            bound = lower_bound(known.problem)
            if bound.seconds < known.best.cost_s - SAME:
                for name, share in at.tasks(self.options.engines):
                    yield name, self._round(known, at.number, share), known
            if known.best is not reached or bound.name == "memory x time":
                at.gained = at.size
            at.go_on(levels)

    def _round(self, known: _Known, number: int, share: float) -> Round:
        return Round(
            problem=known.problem,
            best=known.best,
            repeating=known.repeating,
            bound=lower_bound(known.problem),
            seed=self.options.seed * 1009 + number,
            effort=share * self.options.effort * min(1.0, 2 * LARGE_SEARCH / self.problem.entries),
            without_limits=self.without_limits,
        )


def search_orders(
    problem: SearchProblem,
    options: SearchOptions = SearchOptions(),
    report: Callable[[Progress], None] = lambda p: None,
) -> SearchResult:
    """The fastest order that the engines find within the limits, and a bound on any; the same for the same
    seed unless a time limit or an interrupt (Ctrl-C) ends it early: then the best so far. Raises: PlanError
    if no order keeps to the limits."""
    running = _Search(problem, options, report)
    try:
        ended = running.run()
    except KeyboardInterrupt:
        ended = "interrupted"
    return SearchResult(
        problem=problem,
        best=running.best,
        repeating=running.known.repeating,
        progress=running.progress(),
        ended=ended,
    )


FINE, CLOSE, THOROUGH = 1.03, 1.06, 4 / 3
"""By which one size is at least larger than the one before: of the climb, of those at which few schedules of
the library are built, and of those at which all engines run and all schedules are built."""

LARGE = 500
"""Actions of a step from which on sizes are further apart, in proportion."""

COARSEST = 2.0
"""By which sizes are apart at most."""

PARTS = 64
"""Of a micro-batch, in which sizes are counted where stages hold any bytes."""

SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Levels:
    """problem: as it was asked.  shares: per rank its limit, of the largest one.  low, top: the least size
    with which any order runs, and that beyond which nothing is held.  asked: the largest size within the
    limits, at most `top`.  grain: of which sizes are multiples.  All sizes are 0 where nothing is held."""

    problem: SearchProblem
    shares: tuple[float, ...]
    low: float
    top: float
    asked: float
    grain: float

    def at(self, size: float) -> SearchProblem:
        """The problem with the limits of a size, never above those that were asked for."""
        if self.top == 0:
            return self.problem
        pairs = zip(self.shares, self.problem.limits, strict=True)
        return self.problem.within(tuple(min(share * size, cap) for share, cap in pairs))

    def above(self, size: float, ratio: float) -> float:
        """The next size that is so many times as large; infinite above the top."""
        if size >= self.top:
            return inf
        # Up to the next multiple of the grain; one that is reached but for a rounding is not passed.
        return min(self.top, ceil(size * ratio / self.grain * (1 - SAME)) * self.grain)

    @property
    def fine(self) -> float:
        return min(COARSEST, 1 + (FINE - 1) * max(1.0, self.problem.entries / LARGE))

    def thorough(self) -> tuple[float, ...]:
        """The sizes up to the one that was asked for at which all engines run, and for which schedules of the
        library are built.

        >>> from .problem import SearchStage
        >>> stage = SearchStage(name="0", forward_s=1, input_grad_s=1, weight_grad_s=1, residual_bytes=2.0)
        >>> levels_of(SearchProblem(stages=(stage,), microbatches=20, caps=(25.0,))).thorough()
        (2.0, 4.0, 8.0, 16.0)
        """
        sizes, size = [], self.low
        while size <= self.asked:
            sizes.append(size)
            size = self.after_thorough(size)
        return tuple(sizes)

    def after_thorough(self, size: float) -> float:
        """The next thorough size; far apart where there is room for twice as many micro-batches as ranks."""
        near = size < 2 * self.low * self.problem.ranks
        return self.above(size, max(THOROUGH, self.fine) if near else COARSEST)

    def from_thorough(self, number: int) -> tuple[float, ...]:
        """A thorough size and those between it and the next one, as far as they are within the limits."""
        size = self.thorough()[number]
        sizes, end = [], self.after_thorough(size)
        while size < end and size <= self.asked:
            sizes.append(size)
            size = self.above(size, max(self.fine, CLOSE))
        return tuple(sizes)


def levels_of(problem: SearchProblem) -> Levels:
    unit, finite = max(problem.rank_bytes), [cap for cap in problem.limits if cap < inf]
    most = max(finite, default=inf)
    shares = tuple(
        1.0 if not finite or cap == most else float(f"{cap / most:.12g}") if cap < inf else inf
        for cap in problem.limits
    )
    peaks = one_by_one(problem).peaks
    low = max(peak / share if peak else 0.0 for peak, share in zip(peaks, shares, strict=True))
    held = [problem.microbatches * own for own in problem.rank_bytes]
    top = max(low, *(all_ / share if all_ else 0.0 for all_, share in zip(held, shares, strict=True)))
    sizes = {stage.residual_bytes for stage in problem.stages if stage.residual_bytes > 0}
    grain = min(sizes, default=1.0)
    if any(abs(size / grain - round(size / grain)) > SAME for size in sizes):
        grain = unit / PARTS
    return Levels(
        problem=problem,
        shares=shares,
        low=low,
        top=top,
        asked=min(top, max(low, most * (1 + SAME))),
        grain=grain,
    )
