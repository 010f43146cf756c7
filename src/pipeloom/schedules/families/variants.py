"""1F1B and its relatives on one stage per rank.

eager_1f1b    twice the warm-up, so that transfers hide behind computing; arXiv 2211.05322
async_1f1b    PipeDream: no flush, each micro-batch is an update of its own; arXiv 1806.03377
seq1f1b       each micro-batch in `slices` sequence slices: a smaller warm-up; arXiv 2406.03488
"""

from __future__ import annotations

from ...ir.action import Action, B
from ...ir.errors import ScheduleError
from ..language.patterns import phases
from ..language.recipe import Recipe
from ..language.shape import Shape, options


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
