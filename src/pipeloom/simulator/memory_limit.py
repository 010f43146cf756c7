"""Limit on what ranks hold of residuals: the first action of a schedule that passes it, and what to do.

What a rank holds of residuals, and as scratch, at each action follows from its row alone, by the changes that
the simulator counts (`memory.byte_changes`), whatever the times:

    row       0F0   0F1   0B0   0F2 ...
    begins    +10   +10    +2   +10         bytes that come when an action begins
    ends        0     0   -12     0         bytes that go when it ends
    held       10    20    22    20         while it runs

What is copied to the host is taken to be there until that is awaited: the limit holds at any speed of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..ir.columns import AWAIT_, OFFLOAD_, RELOAD_, Longs
from ..ir.costs import StageCost
from ..ir.errors import ScheduleError
from ..ir.flow import flow_of
from ..ir.schedule import Schedule
from ..ir.stages import StageGraph
from ..ir.text import format_bytes
from .memory import RESIDUALS, TRANSIENT, byte_changes


def check_memory_limit(
    schedule: Schedule,
    stages: StageGraph,
    costs: Sequence[StageCost],
    caps: Sequence[float],
    *,
    show: Callable[[float], str] = format_bytes,
) -> None:
    """No rank holds more residuals and scratch than its cap at any action.

    Parameters, messages and what a partner is lent are not counted.
    schedule: complete, and in order on each rank (see `check`).
    caps: bytes per rank, `inf` for none.  show: how sizes are written in the message.
    Raises: ScheduleError that names the first action that passes a cap, by how much, and the remedy.
    """
    ranks, count = schedule.ranks, schedule.stages
    if len(caps) != ranks or len(costs) != count:
        raise ScheduleError(
            f"{len(caps)} caps and {len(costs)} stage costs for {ranks} ranks and {count} stages",
            hint="give one cap per rank and one StageCost per stage",
        )
    columns = schedule.columns
    changes = byte_changes(columns.kinds, stages, flow_of(stages), costs, columns.trains)
    begins, ends = (table[..., RESIDUALS] + table[..., TRANSIENT] for table in changes)
    for rank, cap in enumerate(caps):
        row = slice(*columns.offsets[rank : rank + 2].tolist())
        comes, goes = (table[columns.stage[row], columns.kind[row]] for table in (begins, ends))
        if columns.copies:
            comes, goes = _awaited(schedule, row, comes, goes)
        held = np.cumsum(comes + goes) - goes
        for position in np.flatnonzero(held > cap)[:1].tolist():
            size, at = int(held[position]), schedule.rows[rank][position]
            hint = "use smaller micro-batches or more stages"
            if comes[position] > cap:
                hint = f"{hint}: {at} alone does not fit, however few micro-batches are in flight"
            else:
                hint = f"run more backwards before {at}, so that fewer micro-batches are in flight; or {hint}"
            raise ScheduleError(
                f"rank {rank} needs {show(size)} at {at}: {show(size - cap)} above its cap of {show(cap)}",
                hint=hint,
            )


def _awaited(schedule: Schedule, row: slice, comes: Longs, goes: Longs) -> tuple[Longs, Longs]:
    """The changes of a row where what an OFFLOAD frees goes with its AWAIT, and comes back only then."""
    columns = schedule.columns
    stage, microbatch, kind = columns.stage[row], columns.microbatch[row], columns.kind[row]
    away, awaited = (schedule.action_index.of(code)[stage, microbatch] for code in (OFFLOAD_, AWAIT_))
    # By entry, what the OFFLOAD of its stage and micro-batch frees, as a number below 0:
    #
    #     row      F0  OFFLOAD0  F1  AWAIT0 ...
    #     goes      0     -10     0      0          as it ends
    #     instead   0       0     0    -10          as it is awaited
    #
    copied = np.zeros(len(kind), np.int64)
    here = away >= row.start
    copied[here] = goes[away[here] - row.start]
    # What nobody awaits is taken to be there all the time: its RELOAD brings nothing.
    comes = np.where((kind == RELOAD_) & (awaited < 0), 0, comes)
    return comes, np.where(kind == OFFLOAD_, 0, np.where(kind == AWAIT_, goes + copied, goes))
