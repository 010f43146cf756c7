"""Optimizer: where a rank's gradients are complete the sum of those that others have too, and the STEPs.

    one update at the end      ... 0B7 | 0REDUCE 0STEP 1STEP
    several, nothing to sum    ... 0B3 | 0STEP0 | 0F7 0B4 ... 0B7 | 0STEP1 | ...
    several, with sums         ... 0B3 | 0REDUCE0 | 0F7 0B4 ... | 0STEP0 | 0F8 ...

A program with several updates is one that never drains (`ir.steady`): update u takes the gradients of the
micro-batches u * every to (u + 1) * every - 1. The optimizer is one per rank, so what counts is when the last
of its stages is done. There REDUCE only begins the sums, and STEP stands as late as can be: in front of the
first forward that may use the new version. Without sums STEP stands where the gradients are complete, so that
one set of gradient buffers is enough.

A schedule without backwards gets none. See `ir.weight_policies` for what a REDUCE stands for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..ir.columns import B_, F_, RECV_B_, RECV_F_, REDUCE_, SEND_B_, SEND_F_, STEP_, W_, Bools, Rows
from ..ir.errors import ScheduleError
from ..ir.operation import writes_gradients
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..ir.weight_policies import Updates


def add_optimizer(program: Program, stages: StageGraph, *, updates: Updates | None = None) -> Program:
    """Insert a REDUCE on the rank's lowest stage that shares parameters (on each rank where updates await the
    norm of all gradients), and the STEPs. updates: of a program with several of them."""
    old = program.columns
    if not old.trains:
        return program
    summed = {stage for readers in stages.tied.values() for stage in readers}
    if program.clips:
        summed = set(range(len(program.placement)))
    inserted: list[tuple[int, int, int, int]] = []  # entry, kind, stage, update
    for rank in range(old.ranks):
        own = [stage for stage, home in enumerate(program.placement) if home == rank]
        first = next((stage for stage in own if stage in summed), None)
        for update, complete in zip(program.updates, _completed(program, rank), strict=True):
            late = complete
            if first is not None:
                inserted.append((complete, REDUCE_, first, update))
                if updates is not None:
                    late = _before_first_use(program, rank, update, complete, updates)
            inserted += [(late, STEP_, stage, update) for stage in own]
    at, kind, stage_of, update_of = np.array(inserted, np.int64).reshape(-1, 4).T
    return replace(program, rows=Rows(old.insert(at, kind, stage_of, update_of)))


def _completed(program: Program, rank: int) -> list[int]:
    """The entry behind the last B or W of each update, and what that sends, and behind operations on its
    gradients."""
    columns = program.columns
    low, high = columns.offsets[rank : rank + 2].tolist()
    if program.every is None:
        return [high]
    writing = [code for code, kind in enumerate(columns.kinds) if writes_gradients(kind)]
    entries = low + np.flatnonzero(columns.among(writing)[low:high])
    update = columns.microbatch[entries] // program.every
    if len(late := entries[(update < np.maximum.accumulate(update)) & ~columns.among((B_, W_))[entries]]):
        raise ScheduleError(
            f"rank {rank} runs {columns.at(int(late[0]))} after gradients of the next update were added",
            hint="run it right behind its anchor, or use --weights flush",
        )
    sends = (columns.kind == SEND_F_) | (columns.kind == SEND_B_)
    ends = [int(entries[update == number].max()) + 1 for number in program.updates]
    return [_skip(sends, end, int(high), step=1) for end in ends]


def _before_first_use(program: Program, rank: int, update: int, complete: int, updates: Updates) -> int:
    """The entry of the first forward, with its messages, that may use the version an update makes."""
    columns = program.columns
    low, high = columns.offsets[rank : rank + 2].tolist()
    receives = (columns.kind == RECV_F_) | (columns.kind == RECV_B_)
    for entry in complete + np.flatnonzero(columns.kind[complete:high] == F_):
        microbatch = int(columns.microbatch[entry])
        if updates.rule.version(microbatch, updates.every, update + 1) > update:
            return max(complete, _skip(receives, int(entry) - 1, low - 1, step=-1) + 1)
    return int(high)


def _skip(chosen: Bools, entry: int, end: int, *, step: int) -> int:
    while entry != end and chosen[entry]:
        entry += step
    return entry
