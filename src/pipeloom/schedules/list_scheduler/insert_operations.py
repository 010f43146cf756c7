"""Puts a user's operations next to their anchors, in rows that are otherwise ready."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...ir.action import Action
from ...ir.operation import Operation
from ..language.shape import Shape
from .problem import Outcome

Near = dict[Action, list[Action]]


def insert_operations(
    shape: Shape, outcome: Outcome, operations: Sequence[Operation]
) -> tuple[tuple[Action, ...], ...]:
    """The rows with each operation right after or before its anchor, or `ahead` anchors earlier.

    A pair stays together: what belongs between its two actions goes in front of it or behind it.
    """
    second = dict(outcome.pairs)
    return tuple(_row(shape, rank, row, operations, second) for rank, row in enumerate(outcome.rows))


def _row(
    shape: Shape,
    rank: int,
    row: Sequence[Action],
    operations: Sequence[Operation],
    second: dict[Action, Action],
) -> tuple[Action, ...]:
    front: Near = defaultdict(list)
    behind: Near = defaultdict(list)
    for operation in operations:
        for stage in shape.rank_stages[rank]:
            anchors = [a for a in row if a.stage == stage and operation.stands_at(a.kind)]
            for at, anchor in enumerate(anchors):
                if not operation.runs(stage, rank, anchor.microbatch):
                    continue
                action = Action(stage, operation.kind, anchor.microbatch)
                if operation.after is not None:
                    behind[anchor].append(action)
                else:
                    front[anchors[max(0, at - operation.ahead)]].append(action)
    actions: list[Action] = []
    late: list[Action] = []
    partner = None
    for action in row:
        if action == partner:
            actions += [action, *late, *behind[action]]
            late, partner = [], None
            continue
        actions += front[action]
        partner = second.get(action)
        if partner is None:
            actions += [action, *behind[action]]
        else:
            actions += [*front[partner], action]
            late = behind[action]
    return tuple(actions)
