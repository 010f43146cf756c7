"""The limits at which a search runs its rounds: the same whatever limit is asked for, up to that one.

Sizes are bytes of the rank with the largest limit; the other ranks get their share of it, so that all limits
grow together. Where all stages hold multiples of the same bytes, so are the sizes: between two multiples
nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from .candidate import one_by_one
from .problem import SearchProblem

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
        return replace(self.problem, caps=tuple(min(share * size, cap) for share, cap in pairs))

    def above(self, size: float, ratio: float) -> float:
        """The next size that is so many times as large; infinite above the top."""
        if size >= self.top:
            return inf
        return min(self.top, ceil(size * ratio / self.grain * (1 - SAME)) * self.grain)

    @property
    def fine(self) -> float:
        """By which neighbouring sizes are apart."""
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
    """The levels of a problem in which one micro-batch after the other keeps to the limits."""
    unit, finite = max(problem.rank_bytes), [cap for cap in problem.limits if cap < inf]
    most = max(finite, default=inf)
    shares = tuple(
        1.0 if not finite or cap == most else round(cap / most, 9) if cap < inf else inf
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
