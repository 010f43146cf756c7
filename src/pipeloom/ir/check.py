"""Checks that a schedule can run: one function per rule, and a message that names rank, action and remedy.

Each rule takes time linear in the number of actions. A rule may rely on those before it in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from . import added_rules, program_rules, rules_eviction, rules_placement
from .action import COMPUTE, Action, B, F, I, W
from .board import Board, Process, Stuck, deadlock
from .errors import ScheduleError
from .flow import Flow, flow_of
from .milestones import Milestone, name_of
from .milestones import gives as gives
from .milestones import needs as needs
from .schedule import Program, Schedule
from .stages import StageGraph

Rule: TypeAlias = Callable[[Schedule, Flow], None]

def check(schedule: Schedule, stages: StageGraph) -> None:
    """Prove that every rank of `schedule` reaches its end with everything computed once.

    A schedule without any backward action is for evaluation: only the forwards must be complete.

    Raises: ScheduleError by the first rule that is broken; DeadlockError if no rank can move.
    """
    flow = flow_of(stages)
    for rule in RULES:
        rule(schedule, flow)


def check_program(program: Program, stages: StageGraph) -> None:
    """Prove the same for a program, its transfers, reductions and optimizer steps included.

    Sends are taken to be asynchronous and messages between two ranks to arrive in the order sent.

    Raises: ScheduleError by the first rule that is broken; DeadlockError if no rank can move.
    """
    flow = flow_of(stages)
    compute = Schedule(
        name="program", microbatches=program.microbatches, placement=program.placement,
        rows=tuple(tuple(step for step in row if isinstance(step, Action)) for row in program.rows),
        pairs=program.pairs,
    )  # fmt: skip
    for rule in (placement, kinds, completeness, order_on_rank, *added_rules.RULES):
        rule(compute, flow)
    for program_rule in program_rules.RULES:
        program_rule(program, stages, flow)


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
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"rank {rank} runs {action}, but the stages are 0 to {schedule.stages - 1}",
                    hint="correct the stage, or drop the action",
                )
            if schedule.placement[action.stage] != rank:
                home = schedule.placement[action.stage]
                raise ScheduleError(
                    f"rank {rank} runs {action}, but stage {action.stage} is placed on rank {home}",
                    hint=f"move {action} to the row of rank {home}",
                )


def kinds(schedule: Schedule, flow: Flow) -> None:
    """Only compute actions of known kinds, on micro-batches that exist."""
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.kind not in COMPUTE:
                raise ScheduleError(
                    f"rank {rank} runs {action}, whose kind is not a compute action",
                    hint=f"use {', '.join(COMPUTE)}, or register the kind; transfers are derived",
                )
            if not 0 <= action.microbatch < schedule.microbatches:
                raise ScheduleError(
                    f"rank {rank} runs {action}, but the micro-batches are 0 to {schedule.microbatches - 1}",
                    hint="correct the micro-batch, or drop the action",
                )


def completeness(schedule: Schedule, flow: Flow) -> None:
    """Each stage runs each micro-batch once: one F, and either one B or one I and one W."""
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action in seen:
                raise ScheduleError(f"rank {rank} runs {action} twice", hint="remove one of them")
            seen.add(action)
    training = any(action.kind in (B, I, W) for row in schedule.rows for action in row)
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            f, b, i, w = (Action(stage, kind, microbatch) for kind in (F, B, I, W))
            if f not in seen:
                raise ScheduleError(f"rank {rank} never runs {f}", hint=f"add {f} to its row")
            if not training:
                continue
            split = [action for action in (i, w) if action in seen]
            if b in seen and split:
                raise ScheduleError(
                    f"rank {rank} runs both {b} and {split[0]}", hint=f"keep either {b}, or {i} and {w}"
                )
            if b not in seen and len(split) < 2:
                missing = f"{b}, nor {i} and {w}" if not split else f"{w if split == [i] else i}"
                add = f"{b}" if not split else missing
                raise ScheduleError(f"rank {rank} never runs {missing}", hint=f"add {add} to its row")


def order_on_rank(schedule: Schedule, flow: Flow) -> None:
    """In a row, what makes something stands before what uses it: F before B or I, I before W, and so on."""
    for rank, row in enumerate(schedule.rows):
        done: set[Milestone] = set()
        for action in row:
            for need in needs(action, flow):
                if need not in done and schedule.placement[need[0]] == rank:
                    maker = name_of(need, schedule)
                    raise ScheduleError(
                        f"rank {rank} runs {action} before {maker}, which it needs",
                        hint=f"move {maker} in front of {action}",
                    )
            done.update(gives(action))


def slice_order(schedule: Schedule, flow: Flow) -> None:
    """Slices of one micro-batch: a forward reads what earlier slices left, a backward what later ones did."""
    k = schedule.slices
    if k == 1:
        return
    for rank, row in enumerate(schedule.rows):
        done: set[Action] = set()
        for action in row:
            at = action.microbatch % k
            step = -1 if action.kind == F else 1
            other = Action(action.stage, action.kind, action.microbatch + step)
            if action.kind in (F, B, I) and 0 <= at + step < k and other not in done:
                raise ScheduleError(
                    f"rank {rank} runs {action} before {other}, another slice of the same micro-batch",
                    hint="run forwards of slices in order and their backwards in the opposite order",
                )
            done.add(action)


def progress(schedule: Schedule, flow: Flow) -> None:
    """Run all ranks: no rank waits for an action that can never happen."""
    board = Board()
    at: dict[int, Action] = {}

    def run(rank: int) -> Process:
        for action in schedule.rows[rank]:
            at[rank] = action
            for need in needs(action, flow):
                yield from board.wait(need)
            for made in gives(action):
                board.post(made)

    lacking = board.run([run(rank) for rank in range(schedule.ranks)])
    if lacking:
        stuck = []
        for rank, key in lacking.items():
            assert isinstance(key, tuple)
            holder = schedule.placement[key[0]]
            stuck.append(Stuck(rank=rank, at=str(at[rank]), needs=name_of(key, schedule), holder=holder))
        raise deadlock(stuck)


RULES: tuple[Rule, ...] = (
    placement, rules_placement.ranks, kinds, completeness, order_on_rank, slice_order,
    rules_eviction.evictions, progress, *added_rules.RULES,
)  # fmt: skip
