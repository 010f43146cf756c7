"""Memory: where residuals leave the device, come back, and are made again.

    OFFLOAD    right behind F and its SENDs
    RELOAD     in front of the compute action before B: the copy runs beside that action
    AWAIT      in front of the F or RELOAD that would be one copy too many on the device
    RECOMPUTE  in front of the RECVs of B: it runs while the gradient is on its way

A micro-batch whose B follows its F at once is not copied: it would come back at once. A
schedule may say itself when single micro-batches of a stage are copied: such a stage gets no other copies,
and loses these if a policy that says something of stages offloads nothing of it. Of another stage that
offloads no more than `MemoryPolicy.at_once` micro-batches have all their residuals on the device, however
slow the copies are:

    F0 OFFLOAD0 F1 OFFLOAD1 F2 OFFLOAD2 AWAIT0 F3 OFFLOAD3 AWAIT1 ...

A stage has RECOMPUTEs if the policy has it recompute ahead; another one does so inside B, or I and W. Split
backwards have these actions before I; what W needs stays from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir.columns import (
    AWAIT_,
    B_,
    F_,
    I_,
    OFFLOAD_,
    RECOMPUTE_,
    RECV_B_,
    RECV_F_,
    RELOAD_,
    SEND_B_,
    SEND_F_,
    W_,
    Ints,
    Rows,
)
from ..ir.memory_policy import MemoryPolicy
from ..ir.schedule import Program
from ..ir.stages import StageGraph

_OFFLOAD, _RECOMPUTE, _AWAIT, _RELOAD, _RUN = range(5)
"""The order of what comes to stand at one place; `_RUN` is what stands there already."""


def add_memory(program: Program, stages: StageGraph, *, policy: MemoryPolicy) -> Program:
    """Insert the actions that a policy asks for; a pair counts as one action. Copies that the schedule has of
    a stage with nothing to offload are left out, unless the policy says nothing at all of stages."""
    count = len(program.placement)
    origins = [stages.origin(stage) for stage in range(count)]
    away = np.array([bool(policy.treated(origin, "offload")) for origin in origins])
    old = program.columns
    if policy.stages:
        empty = old.among((OFFLOAD_, AWAIT_, RELOAD_)) & ~away[old.stage]
        if empty.any():
            program = replace(program, rows=Rows(old.where(~empty)))
            old = program.columns
    away &= ~(program.action_index.of(OFFLOAD_) >= 0).any(axis=1)
    again = np.array([o in policy.ahead and bool(policy.treated(o, "recompute")) for o in origins])
    if not old.trains or not (away | again).any():
        return program
    units = _Units(program)
    forward, back = program.action_index.of(F_), program.action_index.gradients()
    stage, microbatch = (grid.astype(np.int32) for grid in np.indices(forward.shape))
    # Rows of an array per insertion: place, order there, order of need, and what it is.
    insertions: list[NDArray[np.int64]] = []

    def insert(code: int, chosen: NDArray[np.bool_], at: Any, order: Any) -> None:
        rows = np.broadcast_arrays(at, order, back, code, stage, microbatch)
        insertions.append(np.stack([row[chosen].astype(np.int64) for row in rows]))

    behind = units.end[units.number[forward]]
    first = units.number[back] - 1
    copied = away[stage] & (first > units.number[forward])
    reload = np.where(copied, units.head[np.maximum(first, 0)], -1)
    insert(OFFLOAD_, copied, behind, _OFFLOAD)
    insert(RELOAD_, copied, reload, _RELOAD)
    awaits = np.full(forward.shape, -1)
    for s in np.flatnonzero(away).tolist():
        begin = units.begin[units.number[forward[s]]]
        for number, at in _awaited((forward[s], back[s], reload[s], begin), policy.at_once):
            awaits[s, number] = at
    insert(AWAIT_, awaits >= 0, awaits, _AWAIT)
    insert(RECOMPUTE_, again[stage], units.begin[units.number[back]], _RECOMPUTE)
    place, order, need, *what = np.concatenate(insertions, axis=1)
    sequence = np.lexsort((need, order, place))
    return replace(program, rows=Rows(old.insert(place[sequence], *(column[sequence] for column in what))))


def _awaited(entries: tuple[Ints, Ints, Ints, Ints], most: int) -> Iterator[tuple[int, int]]:
    """What a stage waits for so that no more than `most` micro-batches have all their residuals on the
    device: the micro-batch of an OFFLOAD, and the entry in front of which that is awaited.

    entries: per micro-batch that of F, and of B or I; that in front of which RELOAD stands, -1 for what is
    not copied; and that of what F receives.
    """
    forward, back, reload, begin = entries
    events = [(at, _RUN, number, 1) for number, at in enumerate(forward.tolist())]
    events += [(at, _RELOAD, number, 1) for number, at in enumerate(reload.tolist()) if at >= 0]
    events += [(at, _RUN, number, -1) for number, at in enumerate(back.tolist())]
    held, leaving = 0, dict[int, None]()
    for at, order, number, change in sorted(events):
        if order == _RELOAD and number in leaving:
            del leaving[number]  # it goes on with what has not left
            continue
        while change > 0 and held >= most and leaving:
            oldest = next(iter(leaving))
            del leaving[oldest]
            held -= 1
            yield oldest, at if order == _RELOAD else int(begin[number])
        held += change
        if change > 0 and order == _RUN and reload[number] >= 0:
            leaving[number] = None


class _Units:
    """Compute actions of a program with the messages around them; a pair is one unit.

    number: unit of each compute entry.  Per unit, begin: its first RECV.  head: its (first) action.  end:
    behind its last SEND.
    """

    def __init__(self, program: Program) -> None:
        columns = program.columns
        entries = np.arange(len(columns))
        is_main = columns.among((F_, B_, I_, W_))
        heads = is_main.copy()
        for _, second in program.pairs:
            heads[
                program.action_index.of(columns.kinds.index(second.kind))[second.stage, second.microbatch]
            ] = False
        self.number = np.cumsum(heads) - 1
        self.head = np.flatnonzero(heads)
        last = np.flatnonzero(is_main & ~np.append((is_main & ~heads)[1:], False))
        receives = (columns.kind == RECV_F_) | (columns.kind == RECV_B_)
        sends = (columns.kind == SEND_F_) | (columns.kind == SEND_B_)
        starts = columns.offsets[:-1][np.searchsorted(columns.offsets, self.head, side="right") - 1]
        stops = columns.offsets[1:][np.searchsorted(columns.offsets, last, side="right") - 1]
        other = np.maximum.accumulate(np.where(receives, -1, entries))
        self.begin = np.maximum(np.where(self.head > 0, other[self.head - 1] + 1, 0), starts)
        after = np.minimum.accumulate(np.where(sends, len(columns), entries)[::-1])[::-1]
        self.end = np.minimum(np.append(after, len(columns))[last + 1], stops)
