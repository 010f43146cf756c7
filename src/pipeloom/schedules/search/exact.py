"""Exact answers by CP-SAT of OR-tools, the optional extra `search`: to small cases.

Every entry is an interval; those of a rank do not overlap, results arrive before they are used, and residuals
are intervals that fill a store. Messages do not wait for each other here: a step may take longer, none less.
The micro-batches of a unit begin in their order: they are alike, so that renaming them unit by unit makes an
order of that kind from any other one, with the same times.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, lcm
from typing import Any

import numpy as np

from ...ir.action import B, F, W
from .orders import Bound, Found, OrderCandidate, Round, fits, timed
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
