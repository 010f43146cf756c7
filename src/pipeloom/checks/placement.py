"""The rule for ranks: each one has a stage. That each stage has one rank, and each action stands there, is
`check.placement`; a replica is a stage of its own, with its own rank (see `ir.stages`)."""

from __future__ import annotations

from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.schedule import Schedule


def ranks(schedule: Schedule, flow: Flow) -> None:
    """No rank is without a stage.

    >>> from pipeloom.ir.flow import flow_of
    >>> from pipeloom.ir.schedule import parse_rows
    >>> from pipeloom.ir.stages import chain
    >>> idle = Schedule(name="", microbatches=1, placement=(0,), rows=parse_rows(("0F0 0B0", "")))
    >>> ranks(idle, flow_of(chain(1)))
    Traceback (most recent call last):
    pipeloom.ir.errors.ScheduleError: rank 1 has no stage: the stages are on rank 0
    hint: place a stage there, or drop the row
    """
    used = set(schedule.placement)
    idle = [rank for rank in range(schedule.ranks) if rank not in used]
    if not idle:
        return
    who = f"rank {idle[0]} has" if len(idle) == 1 else f"ranks {_listed(idle)} have"
    where = sorted(used)
    on = f"rank {where[0]}" if len(where) == 1 else f"ranks {_listed(where)}"
    raise ScheduleError(
        f"{who} no stage: the stages are on {on}",
        hint="place a stage there, or drop the row"
        if len(idle) == 1
        else "place stages there, or drop the rows",
    )


def _listed(ranks: list[int], shown: int = 8) -> str:
    text = ", ".join(map(str, ranks[:shown]))
    return text if len(ranks) <= shown else f"{text} and {len(ranks) - shown} more"
