"""Optimizer: at the end of a row the sum of tied gradients, then one STEP per stage.

A schedule without backwards gets none. See `ir.ties` for what a REDUCE stands for.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.action import REDUCE, STEP, B, StageAction, W
from ..ir.schedule import Program
from ..ir.stages import StageGraph


def add_optimizer(program: Program, stages: StageGraph) -> Program:
    """Close each row with `sREDUCE`, if one of the rank's stages is tied (s: the lowest), and the `STEP`s."""
    if not any(step.kind in (B, W) for row in program.rows for step in row):
        return program
    tied = {stage for readers in stages.tied.values() for stage in readers}
    sums: list[list[StageAction]] = [[] for _ in program.rows]
    steps: list[list[StageAction]] = [[] for _ in program.rows]
    for stage, rank in enumerate(program.placement):
        steps[rank].append(StageAction(stage, STEP))
        if stage in tied and not sums[rank]:
            sums[rank].append(StageAction(stage, REDUCE))
    rows = tuple((*row, *sums[rank], *steps[rank]) for rank, row in enumerate(program.rows))
    return replace(program, rows=rows)
