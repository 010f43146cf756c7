"""1F1B: after a warm-up of forwards, one backward after each forward. Few micro-batches in flight.

    0F0 0F1 0F2             0B0 0F3     0B1     0B2     0B3
        1F0 1F1         1B0 1F2     1B1 1F3 1B2     1B3
            2F0     2B0 2F1     2B1 2F2 2B2 2F3 2B3          (drawn with backwards as long as forwards)

A stage d steps away from the loss runs d forwards ahead, so d + 1 micro-batches are in flight there. In a
DAG d is the longest path, so that both sides of a skip connection have what they need.

Source: PipeDream-Flush in arXiv 2006.09503; for a DAG: GraphPipe, arXiv 2406.17145.
Idle share with p equal stages and m micro-batches: (p-1)/(m+p-1).
"""

from __future__ import annotations

from ...ir.action import Action
from ...ir.columns import Rows
from ...ir.flow import flow_of
from ...ir.stages import StageGraph
from .clock import distance_to_end, rows_by_clock


def rows(stages: StageGraph, placement: tuple[int, ...], microbatches: int) -> Rows[Action]:
    """The forward of micro-batch i at clock 2i - d - 1, the backward at 2i + d: they alternate.

    A rank with several stages runs them by the same clock. Neighbours on one rank act as one stage.
    A stage whose values never reach the loss, such as one that only updates buffers, has its d from what
    reads it.
    """
    flow = flow_of(stages)
    ahead = distance_to_end(flow, placement)
    steps = [ahead[s] for s in range(len(placement))]
    return rows_by_clock(
        flow, placement, microbatches, forward=[-d - 1 for d in steps], backward=steps, period=2
    )
