"""Orders that engines find, the bounds below which no order can be, and what engines are given and give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

import numpy as np

from ...ir.action import F, I
from ...ir.columns import Floats, Longs
from .problem import QueuedMessage, SearchProblem, TimingArrays, run_order


@dataclass(frozen=True)
class Bound:
    """name: "busiest rank", "busiest link", "critical path" or "memory x time".  why: in words."""

    seconds: float
    name: str
    why: str


def lower_bound(problem: SearchProblem) -> Bound:
    """The largest of all bounds; of equal ones the first.

    >>> from .problem import SearchStage
    >>> parts = {"forward_s": 1.0, "input_grad_s": 1.5, "weight_grad_s": 1.5}
    >>> chain = [SearchStage(name=str(s), after=(s - 1,) if s else (), ranks=(s,), **parts) for s in range(4)]
    >>> lower_bound(SearchProblem(stages=tuple(chain), microbatches=16)).why
    'rank 3 begins at 3, is busy for 64 and leaves 9 to others'
    """
    return max(all_bounds(problem), key=lambda bound: bound.seconds)


def all_bounds(problem: SearchProblem) -> list[Bound]:
    longest = one_microbatch(problem)
    where = "on one rank" if problem.shortest == "span" else "from front to back"
    bounds = [Bound(longest, "critical path", f"one micro-batch takes {longest:g} {where}")]
    for rank in range(problem.ranks):
        bounds += [_busy(problem, rank), _memory(problem, rank)]
    return bounds + _links(problem)


def one_microbatch(problem: SearchProblem) -> float:
    """Seconds from the first forward of a micro-batch to its last action; where spans count, of one rank."""
    units = problem.units
    if problem.shortest == "step":
        return max(h + problem.seconds(u) for h, u in zip(problem.heads, units, strict=True))
    first = {(u.stage, r): i for i, u in enumerate(units) if u.kind == F for r in u.ranks}
    return max(problem.longest(first[u.stage, r], i) for i, u in enumerate(units) for r in u.ranks)


def _ends(problem: SearchProblem, rank: int) -> tuple[float, float]:
    """When a rank can begin at the earliest, and what others do at least after its last action.

    The last action of a rank is the W of a stage, if it has any: whatever I is last, its W comes later.
    Where spans count, a rank's own time is all that does.
    """
    if problem.shortest == "span":
        return 0.0, 0.0
    own = [i for i, u in enumerate(problem.units) if rank in u.ranks]
    head = min(problem.heads[i] for i in own if problem.units[i].kind == F)
    last = [i for i in own if problem.units[i].kind not in (F, I)]
    return head, min(problem.tails[i] for i in last)


def _busy(problem: SearchProblem, rank: int) -> Bound:
    head, tail = _ends(problem, rank)
    busy = problem.microbatches * problem.work[rank]
    why = f"rank {rank} begins at {head:g}, is busy for {busy:g} and leaves {tail:g} to others"
    if problem.shortest == "span":
        why = f"rank {rank} is busy for {busy:g}"
    return Bound(head + busy + tail, "busiest rank", why)


def _memory(problem: SearchProblem, rank: int) -> Bound:
    """Bytes x seconds: each residual lies from the start of its F to the end of its B or W, at least as long
    as its micro-batch takes to come back; all of them must find room between the rank's first and last
    action.

        m * sum of bytes * lifespan <= cap * (step - head - tail)
    """
    head, tail = _ends(problem, rank)
    cap = problem.limits[rank]
    product = problem.microbatches * problem.residual_seconds[rank]
    seconds = product / cap if cap < inf and product else 0.0
    why = f"rank {rank} begins at {head:g}, its residuals fill its limit for {seconds:g}, "
    why += f"and it leaves {tail:g} to others"
    if problem.shortest == "span":
        why = f"residuals of rank {rank} fill its limit for {seconds:g}"
    return Bound(head + seconds + tail if seconds else 0.0, "memory x time", why)


def _links(problem: SearchProblem) -> list[Bound]:
    """Of links whose messages may wait for each other: one is sent first, and something follows the last."""
    if problem.shortest == "span":
        return []
    sent: dict[tuple[int, int], list[QueuedMessage]] = {}
    for message in problem.queued_messages:
        sent.setdefault(message.link, []).append(message)
    bounds = []
    for (source, target), own in sent.items():
        begin = min(problem.heads[one.maker] + problem.seconds(problem.units[one.maker]) for one in own)
        busy = problem.microbatches * sum(one.seconds for one in own)
        rest = min(problem.seconds(problem.units[one.reader]) + problem.tails[one.reader] for one in own)
        why = f"messages from rank {source} to {target} begin at {begin:g}, take {busy:g} and leave {rest:g}"
        bounds.append(Bound(begin + busy + rest, "busiest link", why))
    return bounds


@dataclass(frozen=True, kw_only=True)
class Repeating:
    """A repeating order: per unit when micro-batch 0 runs it, in units of `period`."""

    moments: tuple[float, ...]
    period: float


@dataclass(frozen=True, kw_only=True)
class OrderCandidate:
    """An order of everything, timed: see `problem`. cost_s: what the search makes short, the step or the
    longest span of a rank.  peaks: bytes per rank.  ends: per entry.  engine: who found it."""

    order: Longs = field(repr=False)
    step_s: float
    cost_s: float
    peaks: tuple[float, ...]
    ends: Floats = field(repr=False)
    engine: str
    repeating: Repeating | None = None


def new_clock(problem: SearchProblem) -> TimingArrays:
    ranks, t = problem.ranks, problem.arrays
    return TimingArrays(
        end=np.zeros((len(t.seconds) + len(t.link)) * problem.microbatches),
        link=np.zeros(int(t.link.max(initial=-1)) + 1),
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
        ends=clock.end[: problem.entries],
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
