"""The rule for buffers that a forward updates, such as running means: the order of the updates matters."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.action import Action, F
from ..ir.errors import ScheduleError
from ..ir.schedule import Schedule


def forwards_in_order(schedule: Schedule, updates: Mapping[int, str]) -> None:
    """A stage that updates a buffer runs its micro-batches in order, as one process does.

    updates: stage -> a buffer that its forward updates.

    >>> from pipeloom.ir.schedule import parse_rows
    >>> made = Schedule(name="", microbatches=2, placement=(0,), rows=parse_rows(("0F1 0F0 0B0 0B1",)))
    >>> forwards_in_order(made, {0: "norm.running_mean"})
    Traceback (most recent call last):
    pipeloom.ir.errors.ScheduleError: rank 0 runs 0F0 after 0F1, but stage 0 updates norm.running_mean in each
    hint: run the forwards of stage 0 in the order of their micro-batches
    """
    latest: dict[int, int] = {}
    for rank, row in enumerate(schedule.rows if updates else ()):
        for action in row:
            if action.kind != F or action.stage not in updates:
                continue
            stage, before = action.stage, latest.get(action.stage, -1)
            if action.microbatch < before:
                raise ScheduleError(
                    f"rank {rank} runs {action} after {Action(stage, F, before)}, but stage {stage} updates "
                    f"{updates[stage]} in each",
                    hint=f"run the forwards of stage {stage} in the order of their micro-batches",
                )
            latest[stage] = action.microbatch
