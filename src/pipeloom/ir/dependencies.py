"""Milestones: what a compute action waits for, and what is there once it has run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from .action import KINDS, Action, B, F, I, W
from .flow import Flow
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
