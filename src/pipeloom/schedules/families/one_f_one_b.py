"""1F1B and its relatives, for one stage per rank; forward_only, gpipe and 1f1b for any placement and DAG.

    eager_1f1b    twice the warm-up, so that transfers hide behind computing; arXiv 2211.05322
    async_1f1b    PipeDream: no flush, each micro-batch is an update of its own; arXiv 1806.03377
    seq1f1b       each micro-batch in `slices` sequence slices: a smaller warm-up; arXiv 2406.03488

The first three go by clock cycles: every action has a clock time, and a rank runs its actions by the clock.
No rank can wait for ever if along every dependency between ranks the clock goes up, and along every
dependency within a rank it does not go down: all actions sorted by (clock, place in the stage graph) then
form one order that every row follows. So distances between stages count only the edges that change the rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir.action import Action, B
from ...ir.columns import B_, F_, Codes, Ints, Rows, compute_columns
from ...ir.errors import ScheduleError
from ...ir.flow import Flow
from ..language.patterns import phases
from ..language.recipe import Recipe
from ..language.shape import Shape, options


def distance_from_start(flow: Flow, placement: Sequence[int]) -> dict[int, int]:
    """Stage -> most rank changes on a path that leads to it: the clock of its first forward."""
    return _longest(flow, flow.order, flow.reads_from, placement)


def distance_to_end(flow: Flow, placement: Sequence[int]) -> dict[int, int]:
    """Stage -> most rank changes on a path that leads away from it to a stage that nothing reads."""
    return _longest(flow, tuple(reversed(flow.order)), flow.read_by, placement)


def _longest(
    flow: Flow, order: Sequence[int], before: Sequence[Sequence[int]], placement: Sequence[int]
) -> dict[int, int]:
    """All ranks of a stage have the distance of the farthest: they begin its actions together."""
    distance: dict[int, int] = {}
    for stage in order:
        together = (stage, *flow.shards.get(stage, ()))
        steps = (distance[s] + (placement[s] != placement[one]) for one in together for s in before[one])
        distance[stage] = max(steps, default=0)
    return distance


def rows_by_clock(
    s: Shape, *, forward: Sequence[int], backward: Sequence[int] | None = None, period: int = 1
) -> Rows:
    """For each rank the F, and B if it has a clock, of its stages in clock order.

    forward, backward: clock of micro-batch 0 of each stage; each next micro-batch is `period` later.
    At equal times backwards come first, as they free memory, the reader's before the maker's; then
    forwards, the maker's before the reader's.
    """
    turn = np.arange(s.microbatches, dtype=np.int64) * period
    parts: list[tuple[Codes, Ints, Ints]] = []
    for stages in s.rank_stages:
        streams = [(B_, stage, backward[stage]) for stage in reversed(stages)] if backward is not None else []
        streams += [(F_, stage, forward[stage]) for stage in stages]
        code, where, begin = np.array(streams, np.int64).reshape(-1, 3).T
        order = np.argsort((begin[:, None] + turn).reshape(-1), kind="stable").astype(np.int32)
        stream, microbatch = np.divmod(order, np.int32(s.microbatches))
        parts.append((code.astype(np.int16)[stream], where.astype(np.int32)[stream], microbatch))
    kinds, stages_of, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
    offsets = np.concatenate(([0], np.cumsum([len(kind) for kind, _, _ in parts])))
    return Rows(compute_columns(kinds, stages_of, numbers, offsets))


def forward_only(s: Shape) -> Rows:
    """Forwards without backwards, for evaluation: micro-batch i at distance d from the start at clock i + d.
    0F0 0F1 0F2
        1F0 1F1 1F2
            2F0 2F1 2F2"""
    options(s)
    start = distance_from_start(s.flow, s.placement)
    return rows_by_clock(s, forward=[start[stage] for stage in range(len(s.placement))])


def gpipe(s: Shape) -> Rows:
    """GPipe, arXiv 1811.06965: all forwards, then all backwards; every micro-batch is in flight at once.

        0F0 0F1 0F2                 0B0 0B1 0B2
            1F0 1F1 1F2         1B0 1B1 1B2
                2F0 2F1 2F2 2B0 2B1 2B2
    Idle share with p equal stages and m micro-batches: (p-1)/(m+p-1).
    """
    options(s)
    start = distance_from_start(s.flow, s.placement)
    end = distance_to_end(s.flow, s.placement)
    turn = s.microbatches + max(start.values())
    each = range(len(s.placement))
    return rows_by_clock(s, forward=[start[i] for i in each], backward=[turn + end[i] for i in each])


def one_f_one_b(s: Shape) -> Rows:
    """1F1B: after a warm-up of forwards, one backward after each forward. Few micro-batches in flight.

        0F0 0F1 0F2             0B0 0F3     0B1     0B2     0B3
            1F0 1F1         1B0 1F2     1B1 1F3 1B2     1B3
                2F0     2B0 2F1     2B1 2F2 2B2 2F3 2B3          (drawn with backwards as long as forwards)
    A stage d steps away from the loss, by the longest path, runs d forwards ahead: the forward of micro-batch
    i at clock 2i - d - 1, the backward at 2i + d. A stage whose values never reach the loss, such as one that
    only updates buffers, has its d from what reads it. Idle share as GPipe's. Source: PipeDream-Flush in
    arXiv 2006.09503; for a DAG: GraphPipe, arXiv 2406.17145.
    """
    options(s)
    ahead = distance_to_end(s.flow, s.placement)
    steps = [ahead[stage] for stage in range(len(s.placement))]
    return rows_by_clock(s, forward=[-d - 1 for d in steps], backward=steps, period=2)


def eager_1f1b(s: Shape) -> Recipe:
    options(s)
    return Recipe(rows=phases(s, warm_up=lambda r: 2 * _last(s, r), repeat="FB", kinds="FB"))


def async_1f1b(s: Shape) -> Recipe:
    """The order of 1F1B; what differs is that weights change after every backward."""
    options(s)
    return Recipe(rows=phases(s, warm_up=lambda r: _last(s, r), repeat="FB", kinds="FB"))


def seq1f1b(s: Shape) -> Recipe:
    """1F1B over slices: forwards in order, backwards from the last slice of a micro-batch.

    Slice i of micro-batch b is action b * slices + i, so `microbatches` is a multiple of `slices`.
    """
    k = int(options(s, slices=2)["slices"])
    s.require(
        k >= 1 and s.microbatches % k == 0,
        f"{s.microbatches} slices in groups of {k}",
        "give as many micro-batches as slices of all micro-batches together",
    )

    def backward(rank: int) -> list[Action]:
        starts = range(0, s.microbatches, k)
        return [
            Action(c, B, low + k - 1 - i)
            for low in starts
            for c in s.rank_stages[rank][::-1]
            for i in range(k)
        ]

    rows = phases(s, warm_up=lambda r: _last(s, r) + k - 1, repeat="FB", kinds="FB", backward=backward)
    return Recipe(rows=rows, slices=k)


def _last(s: Shape, rank: int) -> int:
    if len(s.rank_stages[rank]) != 1:
        raise ScheduleError(
            f"rank {rank} has {len(s.rank_stages[rank])} stages, this schedule is for one per rank",
            hint="use interleaved_1f1b, gis or zb_v for several",
        )
    return s.ahead[s.rank_stages[rank][0]]
