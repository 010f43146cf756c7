"""Rules for what a user adds to a schedule: pairs, and operations next to their anchors.

A schedule with neither costs nothing here. `checks.schedules` runs these after its own rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..ir.action import Action, Kind
from ..ir.columns import F_
from ..ir.dependencies import Milestone, meets, needs, produces
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.operation import OPERATIONS, Operation
from ..ir.schedule import Schedule
from .deadlock import Needs, prove_progress


def pairs(schedule: Schedule, flow: Flow) -> None:
    """The two of a pair stand next to each other in one row, in that order, and neither needs the other."""
    if not schedule.pairs:
        return
    place = {a: (rank, at) for rank, row in enumerate(schedule.rows) for at, a in enumerate(row)}
    used: set[Action] = set()
    for first, second in schedule.pairs:
        text = f"{first}&{second}"
        for action in (first, second):
            if action not in place:
                raise ScheduleError(f"no rank runs {action} of the pair {text}", hint=f"add {text} to a row")
            if action in used:
                raise ScheduleError(f"{action} is in two pairs", hint="pair each action once")
            used.add(action)
        rank, at = place[first]
        if place[second] != (rank, at + 1):
            raise ScheduleError(
                f"rank {rank} does not run {second} right after {first}, though {text} is a pair",
                hint=f"write {text} in the row of one rank",
            )
        if not set(produces(first)).isdisjoint(needs(second, flow)):
            raise ScheduleError(
                f"rank {rank} runs {text} as a pair, but {second} needs {first}",
                hint="pair actions that do not need each other, such as F and B of different micro-batches",
            )


def anchors(schedule: Schedule, flow: Flow) -> None:
    """An operation that a schedule has stands at every micro-batch that it is declared for, on the right
    side of its anchor, and nowhere else."""
    present = _operations(schedule)
    if not present:
        return
    for rank, row in enumerate(schedule.rows):
        place = {action: at for at, action in enumerate(row)}
        for operation in present.values():
            for anchor in row:
                if operation.stands_at(anchor.kind):
                    _check_anchored(rank, place, operation, anchor)
        for action in row:
            if action.kind in present:
                _check_declared(rank, present[action.kind], action)


def _check_anchored(rank: int, place: Mapping[Action, int], operation: Operation, anchor: Action) -> None:
    if not operation.runs(anchor.stage, rank, anchor.microbatch):
        return
    action = Action(anchor.stage, operation.kind, anchor.microbatch)
    follows = operation.after is not None
    if action not in place:
        side = "after" if follows else "before"
        raise ScheduleError(f"rank {rank} never runs {action}", hint=f"add it {side} {anchor}")
    if (place[action] > place[anchor]) != follows:
        side, where = ("before", "behind") if follows else ("after", "in front of")
        raise ScheduleError(
            f"rank {rank} runs {action} {side} {anchor}", hint=f"move {action} {where} {anchor}"
        )


def _check_declared(rank: int, operation: Operation, action: Action) -> None:
    if not operation.runs(action.stage, rank, action.microbatch):
        raise ScheduleError(
            f"rank {rank} runs {action}, but {operation.kind} is not declared for it",
            hint="drop it, or change stages=, ranks= or every= of the operation",
        )


def meetings(schedule: Schedule, flow: Flow) -> None:
    """No pair, no operation that meets others, and no stage on several ranks waits for what can never happen.

    Each action is two entries of the proof, as those that meet begin together: all of them come before any of
    them is done.

        entry 2e      its rank has come to action e: it needs what the action needs, and a pair what both need
        entry 2e + 1  action e is done: it needs that the ranks of all that it meets have come to theirs
    """
    present = {k: o for k, o in _operations(schedule).items() if o.meets is not None}
    if not present and not schedule.pairs and not flow.shards:
        return
    _refuse_strangers(schedule, present, flow)
    second = dict(schedule.pairs)
    columns, index = schedule.columns, schedule.action_index
    reached_by = (index.of(F_), index.gradients())  # per phase of a milestone

    def reaching(milestone: Milestone) -> int:
        stage, microbatch, phase = milestone
        return int(reached_by[phase][stage, microbatch])

    def entry_of(action: Action) -> int:
        return int(index.of(columns.kinds.index(action.kind))[action.stage, action.microbatch])

    first, needed = [0], list[int]()
    for row in schedule.rows:
        for action in row:
            members = (action, second[action]) if action in second else (action,)
            needed += [2 * reaching(need) + 1 for member in members for need in needs(member, flow)]
            first.append(len(needed))
            needed += [2 * entry_of(other) for other in meeting_actions(action, flow)]
            first.append(len(needed))
    prove_progress(
        Needs(2 * columns.offsets, np.array(first, np.int32), np.array(needed, np.int32)),
        lambda entry: str(columns.at(entry // 2)),
    )


def meeting_actions(action: Action, flow: Flow) -> Sequence[Action]:
    """The actions on other ranks that begin together with an action."""
    return [Action(s, action.kind, action.microbatch) for s in meets(action.stage, action.kind, flow)]


def _refuse_strangers(schedule: Schedule, present: Mapping[Kind, Operation], flow: Flow) -> None:
    meeting = {action for row in schedule.rows for action in row if action.kind in present}
    for action in sorted(meeting):
        for other in meeting_actions(action, flow):
            if other not in meeting or action not in meeting_actions(other, flow):
                raise ScheduleError(
                    f"{action} meets {other}, which no rank runs or which does not meet it",
                    hint="let meets= name stages that have the operation, both ways",
                )


RULES = (pairs, anchors, meetings)


def _operations(schedule: Schedule) -> dict[Kind, Operation]:
    if not OPERATIONS:
        return {}
    columns = schedule.columns
    kinds = (columns.kinds[code] for code in np.unique(columns.kind))
    return {kind: OPERATIONS[kind] for kind in kinds if kind in OPERATIONS}
