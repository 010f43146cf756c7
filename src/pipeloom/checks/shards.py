"""The rule for stages on several ranks: their shards are on different ranks and run the same kinds.

Shards begin F, B and I of a micro-batch together, so two on one rank would wait for each other, and a shard
that runs B would wait for one that runs I and W. That their orders fit is proved by `added_rules.meetings`.
"""

from __future__ import annotations

import numpy as np

from ..ir.action import Action, B, I, W
from ..ir.columns import B_
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.schedule import Schedule


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
            for microbatch in np.flatnonzero(whole[stage] & ~whole[other])[:1].tolist():
                _refuse_unlike(schedule, stage, other, microbatch)


def _refuse_unlike(schedule: Schedule, stage: int, other: int, microbatch: int) -> None:
    back = Action(stage, B, microbatch)
    parts = " and ".join(str(Action(other, kind, microbatch)) for kind in (I, W))
    raise ScheduleError(
        f"rank {schedule.placement[stage]} runs {back}, but rank {schedule.placement[other]}, which has the "
        f"same stage, runs {parts}",
        hint="split the backward on all ranks of a stage, or on none",
    )
