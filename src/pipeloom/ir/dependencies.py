"""Dependencies: what a compute action waits for, and what is there once it has run.

All else follows from `needs`: which entries of some rows wait for which (`entry_needs`), for checks, for the
list scheduler and for explanations. `meets` says what begins together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .action import KINDS, Action, B, F, I, Kind, W
from .columns import F_, Ints
from .flow import Flow
from .operation import OPERATIONS
from .schedule import Schedule

Milestone: TypeAlias = tuple[int, int, int]
"""(stage, micro-batch, 0 when its outputs are there or 1 when its gradients are, from B or I)."""


def needs(action: Action, flow: Flow) -> Iterator[Milestone]:
    """What must be done, on whatever rank, before an action can start. Registered kinds need what
    they were registered to run after.

    >>> from pipeloom.ir.flow import flow_of
    >>> from pipeloom.ir.stages import chain
    >>> list(needs(Action(1, B, 5), flow_of(chain(3))))
    [(1, 5, 0), (2, 5, 1)]
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind == F:
        for source in flow.reads_from[stage]:
            yield source, microbatch, 0
    elif action.kind in (B, I):
        yield stage, microbatch, 0
        for target in flow.gradients_from[stage]:
            yield target, microbatch, 1
    elif action.kind == W:
        yield stage, microbatch, 1
    elif (row := KINDS.get(action.kind)) is not None and row.after is not None:
        yield stage, microbatch, int(row.after != F)


def produces(action: Action) -> tuple[Milestone, ...]:
    """What is there once an action has run; W ends nothing that another action waits for."""
    if action.kind == F:
        return ((action.stage, action.microbatch, 0),)
    if action.kind in (B, I):
        return ((action.stage, action.microbatch, 1),)
    return ()


def name_of(milestone: Milestone, schedule: Schedule) -> str:
    """The action of `schedule` that reaches a milestone. Only for messages: it searches a row."""
    stage, microbatch, phase = milestone
    if phase == 0:
        return str(Action(stage, F, microbatch))
    split = Action(stage, I, microbatch)
    return str(split if split in schedule.rows[schedule.placement[stage]] else Action(stage, B, microbatch))


class EntryNeed(NamedTuple):
    """What the actions of one kind on one stage need of another stage, or of their own.

    code: the kind.  source, phase: of the milestones.  user, maker: by micro-batch the entries of the action
    and of what it needs, -1 where there is none.
    """

    stage: int
    code: int
    source: int
    phase: int
    user: Ints
    maker: Ints


def entry_needs(rows: Schedule, flow: Flow) -> Iterator[EntryNeed]:
    """All needs of some rows whose stages and micro-batches are in range.

    >>> from pipeloom.ir.flow import flow_of
    >>> from pipeloom.ir.schedule import parse_rows
    >>> from pipeloom.ir.stages import chain
    >>> made = Schedule(name="", microbatches=1, placement=(0, 1), rows=parse_rows(("0F0 0B0", "1F0 1B0")))
    >>> [(n.user.tolist(), n.maker.tolist()) for n in entry_needs(made, flow_of(chain(2)))]
    [([2], [0]), ([1], [0]), ([1], [3]), ([3], [2])]
    """
    columns, index = rows.columns, rows.action_index
    made = (index.of(F_), index.gradients())  # per phase
    for code in np.flatnonzero(np.bincount(columns.kind, minlength=1)).tolist():
        kind = columns.kinds[code]
        users = index.of(code) if KINDS[kind].on_microbatch else ()
        for stage, user in enumerate(users):
            for source, _, phase in needs(Action(stage, kind, 0), flow):
                yield EntryNeed(stage, code, source, phase, user, made[phase][source])


def meets(stage: int, kind: Kind, flow: Flow) -> Sequence[int]:
    """The other stages whose same action on the same micro-batch begins together with this one's: those that
    are the same stage on other ranks, and those that a declared operation says."""
    if kind in (F, B, I):
        return flow.shards.get(stage, ())
    operation = OPERATIONS.get(kind)
    return () if operation is None or operation.meets is None else operation.meets(stage)
