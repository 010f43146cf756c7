"""Exact answers by CP-SAT of OR-tools, the optional extra `search`: to small cases, and one period exactly.

Small cases: every entry is an interval; those of a rank do not overlap, results arrive before they are used,
and residuals are intervals that fill a store. The micro-batches of a unit begin in their order: they are
alike, so that renaming them unit by unit makes an order of that kind from any other one, with the same times.

One period of an order that repeats:

    first[u] = turn[u] * period + phase[u]      when unit u runs micro-batch 0; micro-batch b, b periods later

What a rank runs within one period is a circle on which no two units overlap; results are there before they
are used; and at every forward the rank's residuals, counted by how many turns lie between each stage's F and
its B or W, have room. Of all such orders the one in which a micro-batch takes least from its first forward to
its last action: with the shortest period that is the shortest step, but for what the two ends make of it.

The period is the least that the ranks' work and the residuals allow, then longer and longer ones until none
of them can be better than what is known. Source: modulo scheduling, Rau, MICRO 1994; for pipelines Tessel,
HPCA 2024.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import ceil, floor, inf, lcm
from typing import Any

import numpy as np

from ...ir.action import B, F, W
from .moments import written
from .orders import (
    Bound,
    Found,
    OrderCandidate,
    Repeating,
    Round,
    fits,
    one_microbatch,
    residual_seconds,
    timed,
)
from .problem import SearchProblem


def new_solver(seed: int, effort: float) -> Any:
    """A solver that gives the same answer every time. effort: in CP-SAT's deterministic seconds."""
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process at once ever after
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = effort
    return solver


MOST_ENTRIES = 100

EFFORT = 1.5
"""CP-SAT's own measure of work, about seconds; unlike seconds it is the same on every machine."""

FINEST = 10_000
"""Parts of the longest time into which times that are no simple fractions are rounded up."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """candidate: the best order found.  bound_s: no order is faster.  proved: it is the fastest; or the least
    span with ranks that may begin as late as they like."""

    candidate: OrderCandidate | None
    bound_s: float
    proved: bool


def solver_installed() -> bool:
    return importlib.util.find_spec("ortools") is not None


def solve_orders(task: Round) -> Iterator[Found]:
    if len(task.best.order) > MOST_ENTRIES or not solver_installed():
        return
    answer = solve(task.problem, hint=task.best, effort=EFFORT * task.effort, seed=task.seed)
    bound = Bound(answer.bound_s, "exact", "CP-SAT has searched all orders below it")
    yield Found(candidate=answer.candidate, evaluations=1, bound=bound)


def solve(
    problem: SearchProblem, *, hint: OrderCandidate | None = None, effort: float = 30.0, seed: int = 0
) -> Exact:
    from ortools.sat.python import cp_model

    scale = scale_of(problem)
    model: Any = cp_model.CpModel()
    m, units = problem.microbatches, problem.units
    seconds = [round(problem.seconds(u) * scale) for u in units]
    horizon = m * sum(seconds) + sum(
        round(max(0.0, problem.delay(p, i)) * scale) * m for i in range(len(units)) for p in problem.needs[i]
    )
    start = [[model.new_int_var(0, horizon, "") for _ in range(m)] for _ in units]
    step = model.new_int_var(0, horizon, "")
    latest = horizon if problem.shortest == "span" else 0
    began = [model.new_int_var(0, latest, "") for _ in range(problem.ranks)]
    for i, own in enumerate(problem.needs):
        for b in range(m):
            for p in own:
                delay = round(problem.delay(p, i) * scale)
                model.add(start[i][b] >= start[p][b] + seconds[p] + delay)
            for rank in units[i].ranks:
                model.add(step >= start[i][b] + seconds[i] - began[rank])
                model.add(began[rank] <= start[i][b])
            if b:
                model.add(start[i][b] >= start[i][b - 1] + seconds[i])
    for rank in range(problem.ranks):
        here = [i for i, u in enumerate(units) if rank in u.ranks]
        spans = [
            model.new_fixed_size_interval_var(start[i][b], seconds[i], "") for i in here for b in range(m)
        ]
        model.add_no_overlap(spans)
        _limit_bytes(problem, model, rank, start, seconds)
    model.minimize(step)
    if hint is not None:
        for i in range(len(units)):
            for b in range(m):
                model.add_hint(
                    start[i][b], round((float(hint.ends[i * m + b]) - problem.seconds(units[i])) * scale)
                )
    solver = new_solver(seed, effort)
    status = solver.solve(model)
    found = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        # Of entries of no length that begin together those that are needed come first: units are numbered so.
        moments = [
            (solver.value(start[i][b]), seconds[i] > 0, i, b) for i in range(len(units)) for b in range(m)
        ]
        order = np.array([i * m + b for _, _, i, b in sorted(moments)], np.int64)
        found = timed(problem, order, "exact")
        found = found if fits(found, problem.arrays.cap) else None
    low = float(solver.best_objective_bound) / scale
    return Exact(candidate=found, bound_s=low, proved=status == cp_model.OPTIMAL)


def _limit_bytes(problem: SearchProblem, model: Any, rank: int, start: Any, seconds: list[int]) -> None:
    cap, m, units = problem.limits[rank], problem.microbatches, problem.units
    if cap == inf:
        return
    parts, sizes = _whole_sizes(problem)
    first = {u.stage: i for i, u in enumerate(units) if u.kind == F and rank in u.ranks}
    spans, amounts = [], []
    for i, u in enumerate(units):
        if rank not in u.ranks or u.kind not in (B, W) or not sizes[u.stage]:
            continue
        for b in range(m):
            begin = start[first[u.stage]][b]
            length = model.new_int_var(0, 1 << 40, "")
            spans.append(model.new_interval_var(begin, length, start[i][b] + seconds[i], ""))
            amounts.append(sizes[u.stage])
    if spans:
        model.add_cumulative(spans, amounts, floor(cap * parts * (1 + 1e-12)))


def _whole_sizes(problem: SearchProblem) -> tuple[int, list[int]]:
    """Residuals of all stages as whole numbers, and how many of them one byte is."""
    sizes = [Fraction(s.residual_bytes).limit_denominator(1 << 20) for s in problem.stages]
    parts = lcm(*(size.denominator for size in sizes))
    return parts, [int(size * parts) for size in sizes]


def scale_of(problem: SearchProblem) -> int:
    """By which all times become whole numbers; rounded where there is none that is small."""
    times = {problem.seconds(u) for u in problem.units}
    times |= {problem.delay(p, i) for i in range(len(problem.units)) for p in problem.needs[i]}
    exact = [Fraction(t).limit_denominator(1000) for t in times]
    scale = lcm(*(t.denominator for t in exact))
    if scale <= FINEST and all(abs(float(e) - t) < 1e-9 for e, t in zip(exact, times, strict=True)):
        return scale
    return max(1, ceil(FINEST / max(times)))


PERIOD_EFFORT = 0.1

MOST_PERIODS = 3

FINER = 32
"""Parts of the shortest period by which the next ones are longer."""

MOST_PAIRS = 1500


@dataclass(frozen=True, kw_only=True)
class WholeTimes:
    """Times as whole numbers, `scale` of them one second: fine enough for periods that are no multiples of
    them."""

    problem: SearchProblem
    scale: int
    seconds: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


def solve_periods(task: Round) -> Iterator[Found]:
    if not solver_installed():
        return
    asked = whole_times(task.problem)
    if len(asked.pairs) > MOST_PAIRS:
        return
    m, best = task.problem.microbatches, task.best.cost_s
    path = one_microbatch(task.problem)
    problem = task.problem
    busy = max(
        sum(asked.seconds[i] for i, u in enumerate(problem.units) if r in u.ranks)
        for r in range(problem.ranks)
    )
    lie = max(
        residual_seconds(problem, r) / problem.limits[r] if problem.limits[r] < inf else 0.0
        for r in range(problem.ranks)
    )
    # Per period a rank does the work of one micro-batch, and has room for cap * period of bytes x seconds.
    least = max(1, busy, ceil(lie * asked.scale - 1e-6))
    for number in range(MOST_PERIODS):
        period = least + number * max(1, least // FINER)
        # The last micro-batch begins m - 1 periods after the first, and takes `path` at least.
        if (m - 1) * period / asked.scale + path >= best:
            return
        first = solve_period(asked, period, effort=PERIOD_EFFORT * task.effort)
        found = None if first is None else written(task.problem, first, "kernel")
        if found is not None and fits(found, task.problem.arrays.cap):
            best = min(best, found.cost_s)
        else:
            found = None
        yield Found(candidate=found, evaluations=1)


def whole_times(problem: SearchProblem) -> WholeTimes:
    scale = scale_of(problem)
    scale *= max(1, ceil(FINER / max(1.0, max(problem.work) * scale)))
    units = range(len(problem.units))
    return WholeTimes(
        problem=problem,
        scale=scale,
        seconds=tuple(round(problem.seconds(u) * scale) for u in problem.units),
        pairs=tuple((a, b) for a, b in combinations(units, 2) if problem.arrays.meet[a, b]),
    )


def solve_period(asked: WholeTimes, period: int, *, effort: float) -> Repeating | None:
    """The order with that period in which a micro-batch takes least; None if there is none, or none was found
    within the effort."""
    from ortools.sat.python import cp_model

    problem, seconds = asked.problem, asked.seconds
    model: Any = cp_model.CpModel()
    delays = {
        (p, u): ceil(problem.delay(p, u) * asked.scale - 1e-6)
        for u, needs in enumerate(problem.needs)
        for p in needs
    }
    # Enough turns for any order worth a look: all units one after another, each with a wait of one period.
    turns = 2 + len(problem.units) + (sum(seconds) + sum(delays.values())) // period
    phase = [model.new_int_var(0, period - 1, "") for _ in seconds]
    turn = [model.new_int_var(0, turns, "") for _ in seconds]
    first = [phase[u] + period * turn[u] for u in range(len(seconds))]
    end = model.new_int_var(0, period * (turns + 1) + max(seconds), "")
    for u, took in enumerate(seconds):
        model.add(end >= first[u] + took)
        for p in problem.needs[u]:
            model.add(first[u] >= first[p] + seconds[p] + delays[p, u])
    ahead: dict[tuple[int, int], Any] = {}
    for a, b in asked.pairs:
        one = ahead[a, b] = model.new_bool_var("")
        ahead[b, a] = 1 - one
        # On the circle of one period neither may run into the other, the next turn included:
        #
        #     0       before         behind             period
        #     |-------|=====|........|=======|..........|-------|=====|    the next turn of `before`
        #
        for before, behind, when in ((a, b, one), (b, a, one.Not())):
            model.add(phase[behind] >= phase[before] + seconds[before]).only_enforce_if(when)
            model.add(phase[before] + period >= phase[behind] + seconds[behind]).only_enforce_if(when)
    for rank in range(problem.ranks):
        _limit_turns(problem, model, rank, turn, ahead)
    model.minimize(end)
    solver = new_solver(1, effort)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    moments = [solver.value(turn[u]) * period + solver.value(phase[u]) for u in range(len(seconds))]
    return Repeating(moments=tuple(at / asked.scale for at in moments), period=period / asked.scale)


def _limit_turns(problem: SearchProblem, model: Any, rank: int, turn: Any, ahead: Any) -> None:
    """At each forward of a rank its residuals have room.

    Micro-batches of a stage that are held there: turns between its F and what lets go, one more if F stands
    before the forward in the period, or is it, and one less if what lets go does.
    """
    cap, units = problem.limits[rank], problem.units
    if cap == inf:
        return
    own = [i for i, u in enumerate(units) if rank in u.ranks and problem.stages[u.stage].residual_bytes]
    parts, sizes = _whole_sizes(problem)
    opens = {units[i].stage: i for i in own if units[i].kind == F}
    closes = {units[i].stage: i for i in own if units[i].kind in (B, W)}
    for at in opens.values():
        held = []
        for stage, begin in opens.items():
            last = closes[stage]
            here = 1 if begin == at else ahead[begin, at]
            held.append(sizes[stage] * (turn[last] - turn[begin] + here - ahead[last, at]))
        model.add(sum(held) <= floor(cap * parts * (1 + 1e-12)))
