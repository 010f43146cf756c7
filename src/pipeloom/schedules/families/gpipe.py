"""GPipe: all forwards, then all backwards. Simple; every micro-batch is in flight at once.

    0F0 0F1 0F2                 0B0 0B1 0B2
        1F0 1F1 1F2         1B0 1B1 1B2
            2F0 2F1 2F2 2B0 2B1 2B2

Source: GPipe, arXiv 1811.06965. Idle share with p equal stages and m micro-batches: (p-1)/(m+p-1).
"""

from __future__ import annotations

from ...ir.action import Action
from ...ir.columns import Rows
from ...ir.flow import flow_of
from ...ir.stages import StageGraph
from .clock import distance_from_start, distance_to_end, rows_by_clock


def rows(stages: StageGraph, placement: tuple[int, ...], microbatches: int) -> Rows[Action]:
    """Forwards by distance from the start, as in `forward_only`; then backwards by distance from the end."""
    flow = flow_of(stages)
    start = distance_from_start(flow, placement)
    end = distance_to_end(flow, placement)
    turn = microbatches + max(start.values())
    each = range(len(placement))
    forward, backward = [start[s] for s in each], [turn + end[s] for s in each]
    return rows_by_clock(flow, placement, microbatches, forward=forward, backward=backward)
