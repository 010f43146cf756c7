"""The rule for evictions: what a rank hands to its partner comes back before it is used, and only then."""

from __future__ import annotations

from ..ir.action import EVICT, FETCH, Action, B, F, I, W, eviction_partner
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.schedule import Schedule


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
        made = Action(action.stage, F, action.microbatch)
        raise ScheduleError(
            f"rank {rank} runs {action} after {used}, which has used its residuals",
            hint=f"put {action} between {made} and {used}, or drop it",
        )
