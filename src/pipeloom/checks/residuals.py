"""Rules for residuals between forward and backward: eviction to a peer, offloading, recomputing.

    0F3 0OFFLOAD3 ... 0RELOAD3 ... 0RECOMPUTE3 0B3

Nothing here waits for another rank: OFFLOAD, RELOAD, RECOMPUTE and the backward (B, or I) of one micro-batch
follow each other in one row, so these rules prove that each finds what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..ir.action import EVICT, FETCH, Action, B, F, I, W, eviction_partner
from ..ir.columns import F_, OFFLOAD_, RECOMPUTE_, RELOAD_, TREATING, Bools, Ints
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.schedule import Schedule

ORDERED = (OFFLOAD_, RELOAD_, RECOMPUTE_)
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
    """What is offloaded is reloaded, and only that."""
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
    if (entry := _first((back >= 0) & (away < 0), back)) is not None:
        rank, action = schedule.locate(entry)
        made, offload = _named(schedule, entry, F_), _named(schedule, entry, OFFLOAD_)
        raise ScheduleError(
            f"rank {rank} runs {action}, but nothing of it was offloaded",
            hint=f"add {offload} between {made} and {action}, or drop {action}",
        )


def in_order(schedule: Schedule, flow: Flow) -> None:
    """F, OFFLOAD, RELOAD, RECOMPUTE, and B or I of one micro-batch stand in this order."""
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
        if (entry := _first((treated >= 0) & (evicted >= 0), treated)) is not None:
            rank, action = schedule.locate(entry)
            lent = Action(action.stage, EVICT, action.microbatch)
            raise ScheduleError(
                f"rank {rank} runs {action}, but {lent} lends the same residuals to a partner",
                hint=f"drop {lent} and its FETCH, or {action} and what belongs to it",
            )


def evictions(schedule: Schedule, flow: Flow) -> None:
    """After the F of a micro-batch EVICT and FETCH take turns, and all is back before its B, or I and W."""
    if not {EVICT, FETCH} & set(schedule.columns.kinds):
        return
    for rank, row in enumerate(schedule.rows):
        away: dict[tuple[int, int], Action] = {}
        used: dict[tuple[int, int], Action] = {}
        for action in row:
            place = (action.stage, action.microbatch)
            if action.kind in (B, I, W):
                used[place] = action
            if action.kind in (B, I, W) and place in away:
                fetch = Action(action.stage, FETCH, action.microbatch)
                raise ScheduleError(
                    f"rank {rank} runs {action}, but its residuals are on rank "
                    f"{eviction_partner(rank, schedule.ranks)} since {away[place]}",
                    hint=f"put {fetch} between them, or drop {away[place]}",
                )
            if action.kind == FETCH and away.pop(place, None) is None:
                evict = Action(action.stage, EVICT, action.microbatch)
                raise ScheduleError(
                    f"rank {rank} runs {action}, but nothing of it was evicted",
                    hint=f"put {evict} in front of it, or drop it",
                )
            if action.kind == EVICT:
                _refuse_eviction(rank, action, schedule, used.get(place))
                away[place] = action
        for action in away.values():
            fetch = Action(action.stage, FETCH, action.microbatch)
            raise ScheduleError(f"rank {rank} runs {action} and never {fetch}", hint=f"add {fetch} behind it")


def _refuse_eviction(rank: int, action: Action, schedule: Schedule, used: Action | None) -> None:
    other = eviction_partner(rank, schedule.ranks)
    if other == rank:
        raise ScheduleError(
            f"rank {rank} runs {action}, but it is its own partner", hint=f"drop {action} and its FETCH"
        )
    if used is not None:
        forward = Action(action.stage, F, action.microbatch)
        raise ScheduleError(
            f"rank {rank} runs {action} after {used}, which has used its residuals",
            hint=f"put {action} between {forward} and {used}, or drop it",
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


RULES: tuple[Rule, ...] = (used, both_ways, in_order, in_one_place)
"""For programs that are complete, and in order but for these actions."""
