"""Rules for residuals between forward and backward: copies to the host and back, recomputing.

    0F3 0OFFLOAD3 ... 0AWAIT3 ... 0RELOAD3 ... 0RECOMPUTE3 0B3

Nothing here waits for another rank: OFFLOAD, AWAIT, RELOAD, RECOMPUTE and the backward (B, or I) of one
micro-batch follow each other in one row, so these rules prove that each finds what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..ir.action import Action
from ..ir.columns import AWAIT_, F_, OFFLOAD_, RECOMPUTE_, RELOAD_, TREATING, Bools, Ints
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.schedule import Schedule

ORDERED = (OFFLOAD_, AWAIT_, RELOAD_, RECOMPUTE_)
"""Codes of what stands between F and the backward, in this order."""

Rule: TypeAlias = Callable[[Schedule, Flow], None]


def used(schedule: Schedule, flow: Flow) -> None:
    """Only residuals that a backward reads are offloaded or recomputed."""
    if schedule.columns.treats_residuals and not schedule.columns.trains:
        entry = int(np.argmax(schedule.columns.among(TREATING)))
        rank, action = schedule.locate(entry)
        raise ScheduleError(
            f"rank {rank} runs {action}, but no backward reads its residuals: the program has none",
            hint="drop it: what only runs forward keeps no residuals",
        )


def both_ways(schedule: Schedule, flow: Flow) -> None:
    """What is offloaded is reloaded, and only that; and only that is waited for."""
    if not schedule.columns.treats_residuals:
        return
    away, back = schedule.action_index.of(OFFLOAD_), schedule.action_index.of(RELOAD_)
    if (entry := _first((away >= 0) & (back < 0), away)) is not None:
        rank, action = schedule.locate(entry)
        reload, reader = _named(schedule, entry, RELOAD_), _backward(schedule, entry)
        raise ScheduleError(
            f"rank {rank} runs {action} and never {reload}",
            hint=f"add {reload} between {action} and {reader}",
        )
    awaited = schedule.action_index.of(AWAIT_)
    lonely = np.where(awaited >= 0, awaited, back)
    if (entry := _first((lonely >= 0) & (away < 0), lonely)) is not None:
        rank, action = schedule.locate(entry)
        made, offload = _named(schedule, entry, F_), _named(schedule, entry, OFFLOAD_)
        raise ScheduleError(
            f"rank {rank} runs {action}, but nothing of it was offloaded",
            hint=f"add {offload} between {made} and {action}, or drop {action}",
        )


def in_order(schedule: Schedule, flow: Flow) -> None:
    """F, OFFLOAD, AWAIT, RELOAD, RECOMPUTE, and B or I of one micro-batch stand in this order."""
    if not schedule.columns.treats_residuals:
        return
    index = schedule.action_index
    steps = [index.of(F_), *(index.of(code) for code in ORDERED)]
    steps.append(index.gradients())
    wrong_pairs: list[tuple[int, int]] = []
    for number, late in enumerate(steps):
        for early in steps[:number]:
            wrong = (early >= 0) & (late >= 0) & (early > late)
            wrong_pairs += zip(late[wrong].tolist(), early[wrong].tolist(), strict=True)
    # Schedules are in order without these actions, so one of them is in each of these pairs.
    if wrong_pairs:
        late_entry, early_entry = min(wrong_pairs)
        rank, action = schedule.locate(late_entry)
        _, other = schedule.locate(early_entry)
        raise ScheduleError(
            f"rank {rank} runs {action} before {other}, which comes first of the two",
            hint=f"move {other} in front of {action}: the order is F, OFFLOAD, AWAIT, RELOAD, RECOMPUTE, "
            "B (or I)",
        )


def _first(wrong: Bools, entries: Ints) -> int | None:
    """The first of the entries that are wrong."""
    return int(entries[wrong].min()) if wrong.any() else None


def _named(schedule: Schedule, entry: int, code: int) -> Action:
    """The action of another kind on the micro-batch of an entry."""
    _, action = schedule.locate(entry)
    return Action(action.stage, schedule.columns.kinds[code], action.microbatch)


def _backward(schedule: Schedule, entry: int) -> Action:
    """The B or I that reads the residuals of an entry."""
    _, action = schedule.locate(entry)
    return schedule.locate(int(schedule.action_index.gradients()[action.stage, action.microbatch]))[1]


RULES: tuple[Rule, ...] = (used, both_ways, in_order)
"""For what is complete, and in order but for these actions."""
