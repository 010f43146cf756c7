"""Ranks for stages that name none: the usual placements, each tried in a short search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from ...ir.errors import PlanError, ScheduleError
from ..placements import loop, wave
from .problem import SearchProblem, SearchStage
from .search import Progress, SearchOptions, SearchResult, search_orders

SHORT = 0.2
"""Effort of the short searches, of the one that was asked for."""


def tables(stages: Sequence[SearchStage], ranks: int) -> dict[str, tuple[SearchStage, ...]]:
    """Name -> the stages with ranks, for those without: neighbours together, in a loop, in a wave.

    Stages go in the order in which they are given, which is that of the data. What names its ranks keeps
    them.
    Raises: ScheduleError if there are fewer such stages than ranks that no other stage is on.
    """
    free = [s for s, stage in enumerate(stages) if not stage.ranks]
    taken = {r for stage in stages for r in stage.ranks}
    if len(free) < len(set(range(ranks)) - taken):
        raise ScheduleError(
            f"{len(free)} stages without ranks for {ranks} ranks", hint="use fewer ranks, or more stages"
        )
    chunks = -(-len(free) // ranks)
    found = {
        "neighbours": _neighbours([stages[s] for s in free], ranks),
        "loop": list(loop(ranks, chunks)[: len(free)]),
        "wave": list(wave(ranks, chunks)[: len(free)]),
    }
    result: dict[str, tuple[SearchStage, ...]] = {}
    for name, where in found.items():
        rank = dict(zip(free, where, strict=True))
        placed = tuple(
            replace(stage, ranks=(rank[s],)) if s in rank else stage for s, stage in enumerate(stages)
        )
        if placed not in result.values():
            result[name] = placed
    return result


def _neighbours(stages: Sequence[SearchStage], ranks: int) -> list[int]:
    """Runs of stages, so that the busiest is as short as possible; every rank has one while there are enough.

    longest[k][s]: of the first s stages on k ranks = min over t of max(longest[k-1][t], sum of t..s)
    """
    work = [stage.forward_s + stage.backward_s for stage in stages]
    count = len(work)
    ranks = min(ranks, count)
    longest = [[inf] * (count + 1) for _ in range(ranks + 1)]
    begin = [[0] * (count + 1) for _ in range(ranks + 1)]
    longest[0][0] = 0.0
    for k in range(1, ranks + 1):
        for s in range(k, count + 1):
            for t in range(k - 1, s):
                busiest = max(longest[k - 1][t], sum(work[t:s]))
                if busiest < longest[k][s]:
                    longest[k][s], begin[k][s] = busiest, t
    where = [0] * count
    end = count
    for k in range(ranks, 0, -1):
        where[begin[k][end] : end] = [k - 1] * (end - begin[k][end])
        end = begin[k][end]
    return where


def search_placed(
    problem: Callable[[tuple[SearchStage, ...]], SearchProblem],
    stages: Sequence[SearchStage],
    ranks: int,
    options: SearchOptions,
    report: Callable[[Progress], None],
) -> SearchResult:
    """The best of all placements: the one that a short search likes best is searched in full.

    Raises: PlanError if no order of any of them keeps to the limits.
    """
    best: SearchResult | None = None
    refused: PlanError | None = None
    short = replace(options, effort=options.effort * SHORT)
    for placed in tables(stages, ranks).values():
        try:
            found = search_orders(problem(placed), short, report)
        except PlanError as error:
            refused = error
            continue
        if best is None or found.best.cost_s < best.best.cost_s:
            best = found
        if found.ended in ("interrupted", "time limit"):
            return best
    if best is None:
        assert refused is not None
        raise refused
    full = search_orders(best.problem, options, report)
    return full if full.best.cost_s <= best.best.cost_s else best
