"""Rules for where stages are: each on one rank, each rank with a stage, shards of a stage on different ranks.

A replica is a stage of its own, with its own rank (see `ir.stages.replicate`).
"""

from __future__ import annotations

import numpy as np

from ..ir.action import Action, B, I, W
from ..ir.columns import B_, Bools
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.schedule import Schedule


def placement(schedule: Schedule, flow: Flow) -> None:
    """Every stage has a rank, and every action stands in the row of its stage's rank."""
    if schedule.stages != len(flow.order):
        raise ScheduleError(
            f"the placement names {schedule.stages} stages, the stage graph has {len(flow.order)}",
            hint="give one rank per stage",
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}, but the ranks are 0 to {schedule.ranks - 1}",
                hint="place it on one of them, or add a row",
            )
    columns = schedule.columns
    homes = np.array(schedule.placement, np.int32)
    own = np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(columns.offsets))
    out = (columns.stage < 0) | (columns.stage >= schedule.stages)
    entry = first_true(out | (homes[np.clip(columns.stage, 0, schedule.stages - 1)] != own))
    if entry is None:
        return
    rank, action = schedule.locate(entry)
    if out[entry]:
        raise ScheduleError(
            f"rank {rank} runs {action}, but the stages are 0 to {schedule.stages - 1}",
            hint="correct the stage, or drop the action",
        )
    home = schedule.placement[action.stage]
    raise ScheduleError(
        f"rank {rank} runs {action}, but stage {action.stage} is placed on rank {home}",
        hint=f"move {action} to the row of rank {home}",
    )


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


def shards(schedule: Schedule, flow: Flow) -> None:
    """No rank has two shards of a stage, and all split a micro-batch's backward or none does."""
    for stage, others in flow.shards.items():
        rank = schedule.placement[stage]
        for other in others:
            if schedule.placement[other] == rank:
                raise ScheduleError(
                    f"rank {rank} has the stages {stage} and {other}, which are one stage on several ranks",
                    hint="place them on different ranks, or keep one of them",
                )
    for stage, others in flow.shards.items():
        whole = schedule.action_index.of(B_) >= 0
        for other in others:
            if (microbatch := first_true(whole[stage] & ~whole[other])) is not None:
                parts = " and ".join(str(Action(other, kind, microbatch)) for kind in (I, W))
                raise ScheduleError(
                    f"rank {schedule.placement[stage]} runs {Action(stage, B, microbatch)}, but rank "
                    f"{schedule.placement[other]}, which has the same stage, runs {parts}",
                    hint="split the backward on all ranks of a stage, or on none",
                )


def first_true(wrong: Bools) -> int | None:
    entry = int(np.argmax(wrong)) if wrong.size else 0
    return entry if wrong.size and wrong[entry] else None
