"""The list of passes, and `lower`, which runs them between two checks."""

from __future__ import annotations

from functools import partial

from ..checks.schedules import check, check_program
from ..ir.columns import Rows
from ..ir.memory_policy import KEEP_ALL, MemoryPolicy
from ..ir.schedule import Program, Schedule
from ..ir.stages import StageGraph
from ..ir.weight_policies import Updates
from .memory import add_memory
from .optimizer import add_optimizer
from .transfers import add_transfers, join_pairs


def lower(
    schedule: Schedule,
    stages: StageGraph,
    *,
    policy: MemoryPolicy = KEEP_ALL,
    updates: Updates | None = None,
    clips: bool = False,
) -> Program:
    """Make everything besides computing explicit, and prove that no rank can block.

    policy: what becomes of residuals, by the stage of the first replica.
    updates: of a schedule with several of them (see `ir.steady`); None for one at its end.
    clips: such an update awaits the norm of all gradients.
    Raises: ScheduleError if the schedule breaks a rule; DeadlockError if its order blocks; PlanError if the
        policy names a stage that there is not.

    >>> from pipeloom.ir.schedule import parse_rows
    >>> from pipeloom.ir.stages import chain
    >>> rows = parse_rows(("0F0 0B0", "1F0 1B0"))
    >>> schedule = Schedule(name="by hand", microbatches=1, placement=(0, 1), rows=rows)
    >>> print(lower(schedule, chain(2)))
    0F0 0SEND_F0>1 0RECV_B0<1 0B0 0STEP
    1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP
    """
    check(schedule, stages)
    policy.require_stages(len(stages.stages) // stages.replicas)
    program = Program(
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        rows=Rows(schedule.columns),
        pairs=schedule.pairs,
        every=None if updates is None else updates.every,
        clips=clips and updates is not None,
    )
    # Memory actions stand around whole pairs, so they come once those are closed up.
    memory, optimizer = partial(add_memory, policy=policy), partial(add_optimizer, updates=updates)
    for make in (add_transfers, join_pairs, memory, optimizer):
        program = make(program, stages)
    check_program(program, stages)
    return program
