"""Forwards without backwards, for evaluation.

0F0 0F1 0F2
    1F0 1F1 1F2
        2F0 2F1 2F2
"""

from __future__ import annotations

from ...ir.action import Action
from ...ir.columns import Rows
from ...ir.flow import flow_of
from ...ir.stages import StageGraph
from .clock import distance_from_start, rows_by_clock


def rows(stages: StageGraph, placement: tuple[int, ...], microbatches: int) -> Rows[Action]:
    """Stage s, at distance d from the start, runs the forward of micro-batch i at clock i + d."""
    flow = flow_of(stages)
    start = distance_from_start(flow, placement)
    return rows_by_clock(flow, placement, microbatches, forward=[start[s] for s in range(len(placement))])
