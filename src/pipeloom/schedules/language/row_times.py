"""When everything in some rows happens, by the simulator: to choose between orders."""

from __future__ import annotations

import numpy as np

from ...ir.columns import Columns, Floats, Rows
from ...ir.schedule import Program
from ...lowering.transfers import add_transfers
from ...simulator.simulate import time_actions
from .shape import Shape


def row_times(columns: Columns, shape: Shape) -> tuple[Floats, Floats]:
    """When each entry of rows that can run begins and ends, in seconds. A rank has two receives posted for
    each rank that sends to it: a message sent further ahead waits until an earlier one is taken."""
    program = Program(microbatches=shape.microbatches, placement=shape.placement, rows=Rows(columns))
    program = add_transfers(program, shape.stages)
    stages = range(len(shape.placement))
    seconds = np.zeros((len(stages), len(columns.kinds)))
    for code in np.unique(columns.kind).tolist():
        seconds[:, code] = [shape.seconds(s, columns.kinds[code]) for s in stages]
    shared = shape.uplinks is not None and shape.uplinks.hold_up(shape.costs)
    begin, end = time_actions(
        program,
        shape.stages,
        seconds,
        shape.delay_s,
        uplinks=shape.uplinks.of_rank if shape.uplinks is not None and shared else (),
        copy_link_s=shape.uplinks.seconds if shape.uplinks is not None and shared else (),
    )
    own = ~program.columns.is_transfer
    return begin[own], end[own]
