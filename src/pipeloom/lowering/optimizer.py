"""Optimizer: at the end of a row the sum of tied gradients, then one STEP per stage.

A schedule without backwards gets none. See `ir.tied_gradients` for what a REDUCE stands for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir.columns import B_, REDUCE_, STEP_, W_, Columns, Rows
from ..ir.schedule import Program
from ..ir.stages import StageGraph


def add_optimizer(program: Program, stages: StageGraph) -> Program:
    """Close each row with `sREDUCE`, if one of the rank's stages is tied (s: the lowest), and the `STEP`s."""
    old = program.columns
    if not ((old.kind == B_) | (old.kind == W_)).any():
        return program
    tied = {stage for readers in stages.tied.values() for stage in readers}
    sums: list[list[tuple[int, int]]] = [[] for _ in range(old.ranks)]
    steps: list[list[tuple[int, int]]] = [[] for _ in range(old.ranks)]
    for stage, rank in enumerate(program.placement):
        steps[rank].append((STEP_, stage))
        if stage in tied and not sums[rank]:
            sums[rank].append((REDUCE_, stage))
    closing = [[*sums[rank], *steps[rank]] for rank in range(old.ranks)]
    ends = np.repeat(old.offsets[1:], [len(row) for row in closing])
    kind, stage_of = np.array([step for row in closing for step in row], np.int64).reshape(-1, 2).T
    added = np.concatenate(([0], np.cumsum([len(row) for row in closing])))

    def closed(column: NDArray[Any], values: Any) -> NDArray[Any]:
        return np.insert(column, ends, values)

    columns = Columns(
        kind=closed(old.kind, kind),
        stage=closed(old.stage, stage_of),
        microbatch=closed(old.microbatch, -1),
        peer=closed(old.peer, -1),
        offsets=old.offsets + added,
        kinds=old.kinds,
    )
    return replace(program, rows=Rows(columns))
