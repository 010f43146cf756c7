"""Rules for what a program does with residuals between forward and backward, one function each.

    0F3 0OFFLOAD3 ... 0RELOAD3 ... 0RECOMPUTE3 0B3

Nothing here waits for another rank: OFFLOAD, RELOAD, RECOMPUTE and the backward (B, or I) of one micro-batch
follow each other in one row, so these rules prove that each finds what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..ir.action import EVICT, Action
from ..ir.columns import F_, OFFLOAD_, RECOMPUTE_, RELOAD_, TREATING, Bools, Ints
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.schedule import Schedule

Rule: TypeAlias = Callable[[Schedule, Flow], None]


def used(schedule: Schedule, flow: Flow) -> None:
    """Only residuals that a backward reads are offloaded or recomputed."""
    if schedule.columns.treats_residuals and not schedule.columns.trains:
        entry = int(np.argmax(schedule.columns.among(TREATING)))
        rank, action = _at(schedule, entry)
        raise ScheduleError(
            f"rank {rank} runs {action}, but no backward reads its residuals: the program has none",
            hint="drop it: what only runs forward keeps no residuals",
        )


def both_ways(schedule: Schedule, flow: Flow) -> None:
    """What is offloaded is reloaded, and only that."""
    if not schedule.columns.treats_residuals:
        return
    away, back = schedule.action_index.of(OFFLOAD_), schedule.action_index.of(RELOAD_)
    if (found := _first((away >= 0) & (back < 0), away)) is not None:
        rank, action = _at(schedule, found)
        reload, reader = _named(schedule, found, RELOAD_), _backward(schedule, found)
        raise ScheduleError(
            f"rank {rank} runs {action} and never {reload}",
            hint=f"add {reload} between {action} and {reader}",
        )
    if (found := _first((back >= 0) & (away < 0), back)) is not None:
        rank, action = _at(schedule, found)
        made, offload = _named(schedule, found, F_), _named(schedule, found, OFFLOAD_)
        raise ScheduleError(
            f"rank {rank} runs {action}, but nothing of it was offloaded",
            hint=f"add {offload} between {made} and {action}, or drop {action}",
        )


def in_order(schedule: Schedule, flow: Flow) -> None:
    """F, OFFLOAD, RELOAD, RECOMPUTE, and B or I of one micro-batch stand in this order."""
    if not schedule.columns.treats_residuals:
        return
    index = schedule.action_index
    steps = [index.of(F_), *(index.of(code) for code in (OFFLOAD_, RELOAD_, RECOMPUTE_))]
    steps.append(index.gradients())
    found: list[tuple[int, int]] = []
    for number, late in enumerate(steps):
        for early in steps[:number]:
            wrong = (early >= 0) & (late >= 0) & (early > late)
            found += zip(late[wrong].tolist(), early[wrong].tolist(), strict=True)
    # Schedules are in order without these actions, so one of them is in each of these pairs.
    if found:
        late_entry, early_entry = min(found)
        rank, action = _at(schedule, late_entry)
        _, other = _at(schedule, early_entry)
        raise ScheduleError(
            f"rank {rank} runs {action} before {other}, which comes first of the two",
            hint=f"move {other} in front of {action}: the order is F, OFFLOAD, RELOAD, RECOMPUTE, B (or I)",
        )


def in_one_place(schedule: Schedule, flow: Flow) -> None:
    """No residuals are both lent to a partner and offloaded to the host, or recomputed."""
    columns = schedule.columns
    if not columns.treats_residuals or EVICT not in columns.kinds:
        return
    evicted = schedule.action_index.of(columns.kinds.index(EVICT))
    for code in (OFFLOAD_, RECOMPUTE_):
        treated = schedule.action_index.of(code)
        if (found := _first((treated >= 0) & (evicted >= 0), treated)) is not None:
            rank, action = _at(schedule, found)
            lent = Action(action.stage, EVICT, action.microbatch)
            raise ScheduleError(
                f"rank {rank} runs {action}, but {lent} lends the same residuals to a partner",
                hint=f"drop {lent} and its FETCH, or {action} and what belongs to it",
            )


def _first(wrong: Bools, entries: Ints) -> int | None:
    """The first of the entries that are wrong."""
    return int(entries[wrong].min()) if wrong.any() else None


def _at(schedule: Schedule, entry: int) -> tuple[int, Action]:
    """Rank and action of an entry."""
    rank = schedule.columns.rank_of(entry)
    return rank, schedule.rows[rank][entry - int(schedule.columns.offsets[rank])]


def _named(schedule: Schedule, entry: int, code: int) -> Action:
    """The action of another kind on the micro-batch of an entry."""
    _, action = _at(schedule, entry)
    return Action(action.stage, schedule.columns.kinds[code], action.microbatch)


def _backward(schedule: Schedule, entry: int) -> Action:
    """The B or I that reads the residuals of an entry."""
    _, action = _at(schedule, entry)
    return _at(schedule, int(schedule.action_index.gradients()[action.stage, action.microbatch]))[1]


RULES: tuple[Rule, ...] = (used, both_ways, in_order, in_one_place)
"""For programs that are complete, and in order but for these actions."""
