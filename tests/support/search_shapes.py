"""Shapes of stages that schedule searches are compared on: V, X, M, NN and K, as in Tessel (HPCA 2024).

F takes 1 and B 3; where a backward is split, I and W each half of B. A micro-batch takes one unit of memory
on a stage. A stage on all ranks takes F = B = 1.
"""

from collections.abc import Callable
from dataclasses import replace

from pipeloom.schedules.search.library import LARGE, within_limits, without_limits
from pipeloom.schedules.search.orders import OrderCandidate, fits
from pipeloom.schedules.search.problem import SearchProblem, SearchStage


def _stage(name: str, after: list[int], ranks: list[int], *, split: bool, wide: bool = False) -> SearchStage:
    times = {"forward_s": 1.0} | dict.fromkeys(("input_grad_s", "weight_grad_s"), 0.5 if wide else 1.5)
    where = {"after": tuple(after), "ranks": tuple(ranks)}
    return SearchStage(name=name, split=split, residual_bytes=1.0, **times, **where)


def _without_memory(stage: SearchStage) -> SearchStage:
    return replace(stage, residual_bytes=0.0)


def v(ranks: int, split: bool = False) -> list[SearchStage]:
    """A chain: stage s on rank s."""
    return [_stage(str(s), [s - 1] if s else [], [s], split=split) for s in range(ranks)]


def x(ranks: int, split: bool = False) -> list[SearchStage]:
    """Two chains in opposite directions, with as many micro-batches each."""
    back = [
        _stage(f"back {s}", [ranks + s - 1] if s else [], [ranks - 1 - s], split=split) for s in range(ranks)
    ]
    return v(ranks, split) + back


def m(ranks: int, split: bool = False) -> list[SearchStage]:
    """V behind a stage on all ranks, which holds nothing."""
    first = _without_memory(_stage("wide", [], list(range(ranks)), split=split, wide=True))
    return [first, *(_stage(str(s), [s], [s], split=split) for s in range(ranks))]


def nn(ranks: int, split: bool = False) -> list[SearchStage]:
    """M with a second such stage in the middle of the chain."""
    made = m(ranks, split)[:1]
    for s in range(ranks):
        if s == ranks // 2:
            wide = _stage("wide 2", [len(made) - 1], list(range(ranks)), split=split, wide=True)
            made.append(_without_memory(wide))
        made.append(_stage(str(s), [len(made) - 1], [s], split=split))
    return made


def k(ranks: int, split: bool = False) -> list[SearchStage]:
    """Two chains of half the length, which both feed a stage on all ranks."""
    half = ranks // 2
    made = [_stage(f"a{s}", [s - 1] if s else [], [s], split=split) for s in range(half)]
    made += [_stage(f"b{s}", [half + s - 1] if s else [], [half + s], split=split) for s in range(half)]
    return [*made, _stage("joint", [half - 1, 2 * half - 1], list(range(ranks)), split=split, wide=True)]


SHAPES: dict[str, Callable[[int, bool], list[SearchStage]]] = {"V": v, "X": x, "M": m, "NN": nn, "K": k}


def problem(shape: str, ranks: int, microbatches: int, cap: float, *, split: bool = False) -> SearchProblem:
    """One case of the table."""
    return SearchProblem(
        stages=tuple(SHAPES[shape](ranks, split)), microbatches=microbatches, caps=(cap,) * ranks
    )


def library_order(problem: SearchProblem, name: str) -> OrderCandidate | None:
    """A schedule of the library as an order; None if it does not run so, or breaks a limit.

    The shorter of what it is without knowing the limits, if it keeps to them, and of what it makes of them.
    """
    free = without_limits(replace(problem, caps=()), name)
    if free is None or not problem.caps:
        return free
    free = free if fits(free, problem.arrays.cap) else None
    if free is not None and problem.entries > LARGE:
        return free
    limited = within_limits(problem, name)
    known = [one for one in (free, limited) if one is not None]
    return min(known, key=lambda one: one.cost_s, default=None)
