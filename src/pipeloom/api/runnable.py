"""What the runtime can run, and the sentence for what it cannot."""

from __future__ import annotations

from .. import schedules
from ..ir.action import F
from ..ir.errors import ScheduleError
from ..ir.plan import Plan


def require_runnable(schedule: str) -> None:
    """Refuse a schedule of the library that needs what the runtime has not, before anything starts.

    schedule: its name; `file.py:function` is loaded, so that its operations are known. Any other name that
        the library does not know is only checked when built.
    Raises: ScheduleError that names the reason.
    """
    if schedule.endswith(".csv"):
        return  # a plan has the rows of the file; it may be gone by now
    own = schedules.names_own(schedule)
    name = schedule if own else schedule.partition(":")[0].lower().replace("-", "_")
    if (own or name in schedules.names()) and (lacks := schedules.entry(name).lacks):
        raise ScheduleError(
            f"schedule {name} cannot be run: it needs {lacks}, which the runtime does not have",
            hint="it can be checked, simulated and drawn; to run, choose another one: pipeloom schedule list",
        )


def trains(plan: Plan) -> bool:
    """Whether a plan's schedule has backwards."""
    return any(action.kind != F for row in plan.as_schedule.rows for action in row)


def require_training(plan: Plan) -> None:
    """Raises: ScheduleError for a plan that only evaluates."""
    if not trains(plan):
        raise ScheduleError(
            f"schedule {plan.schedule} has no backwards: it cannot train",
            hint="evaluate with it (Pipeline.evaluate), or plan for another schedule",
        )
