"""Checks that a schedule can run: one function per rule, and a message that names rank, action and remedy.

Rules read the columns of a schedule, not its actions one by one, and take time linear in their number. A rule
may rely on those before it in `RULES`. A replica is a stage of its own, with its own rank.

Residuals between forward and backward go one way in one row, so no rank waits for another there:

    0F3 0OFFLOAD3 ... 0AWAIT3 ... 0RELOAD3 ... 0RECOMPUTE3 0B3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from ..ir.action import KINDS, OFFLOAD, RELOAD, Action, B, F, I, Kind, W
from ..ir.columns import (
    AWAIT_,
    B_,
    F_,
    I_,
    OFFLOAD_,
    RECOMPUTE_,
    RELOAD_,
    TREATING,
    W_,
    Bools,
    Rows,
    starts_of,
)
from ..ir.dependencies import Milestone, entry_needs, meets, name_of, needs, produces
from ..ir.errors import ScheduleError
from ..ir.flow import Flow, flow_of
from ..ir.operation import OPERATIONS, Operation
from ..ir.schedule import Program, Schedule
from ..ir.stages import StageGraph
from . import programs
from .deadlock import Needs, prove_progress


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


Rule: TypeAlias = Callable[[Schedule, Flow], None]


def check(schedule: Schedule, stages: StageGraph) -> None:
    """Prove that every rank reaches its end with everything computed once; without backwards (evaluation)
    only forwards must be complete. Raises: ScheduleError by the first rule that is broken; DeadlockError if
    no rank can move."""
    flow = flow_of(stages)
    for rule in RULES:
        rule(schedule, flow)


def _computing(program: Program) -> Schedule:
    return Schedule(
        name="program",
        microbatches=program.microbatches,
        placement=program.placement,
        rows=Rows(program.columns.where(program.columns.is_compute)),
        pairs=program.pairs,
    )


def check_program(program: Program, stages: StageGraph) -> None:
    """Prove the same for a program, its transfers, reductions and optimizer steps included. Sends are
    asynchronous; messages between two ranks arrive in the order sent."""
    flow = flow_of(stages)
    compute = _computing(program)
    for rule in PROGRAM_RULES:
        rule(compute, flow)
    for program_rule in programs.RULES:
        program_rule(program, stages, flow)


def kinds(schedule: Schedule, flow: Flow, *, in_program: bool = False) -> None:
    """Only compute actions of known kinds, on micro-batches that exist; in a program RECOMPUTE is one."""
    columns = schedule.columns
    allowed = {k for k, row in KINDS.items() if (row.on_microbatch if in_program else row.in_schedule)}
    known = np.array([kind in allowed for kind in columns.kinds])
    out = (columns.microbatch < 0) | (columns.microbatch >= schedule.microbatches)
    entry = first_true(~known[columns.kind] | out)
    if entry is None:
        return
    rank, action = schedule.locate(entry)
    if not known[columns.kind[entry]]:
        treats = columns.kind[entry] in TREATING
        policy = "drop it: the memory policy of a plan says what is recomputed"
        raise ScheduleError(
            f"rank {rank} runs {action}, whose kind is not a compute action",
            hint=policy if treats else "use F, B, I, W, or register the kind; transfers are derived",
        )
    raise ScheduleError(
        f"rank {rank} runs {action}, but the micro-batches are 0 to {schedule.microbatches - 1}",
        hint="correct the micro-batch, or drop the action",
    )


kinds_of_program = partial(kinds, in_program=True)


def completeness(schedule: Schedule, flow: Flow) -> None:
    """Each stage runs each micro-batch once: one F, and either one B or one I and one W."""
    if schedule.stages * schedule.microbatches > len(schedule.columns):
        raise _too_few(schedule)  # without tables, which could be far larger than the schedule
    columns, index = schedule.columns, schedule.action_index
    for code in np.flatnonzero(np.bincount(columns.kind, minlength=W_ + 1)).tolist():
        if np.count_nonzero(index.of(code) >= 0) < index.counted[code]:
            raise programs.repeated(schedule.rows)
    f, b, i, w = (index.of(code) >= 0 for code in (F_, B_, I_, W_))
    wrong = ~f
    if columns.trains:  # with B neither I nor W; without it both
        wrong |= np.where(b, i | w, ~(i & w))
    cell = first_true(wrong.reshape(-1))
    if cell is None:
        return
    stage, microbatch = divmod(cell, schedule.microbatches)
    here = (Action(stage, kind, microbatch) for kind in (F, B, I, W))
    has = (bool(table[stage, microbatch]) for table in (f, b, i, w))
    raise _wrong(schedule, stage, microbatch, {a for a, there in zip(here, has, strict=True) if there})


def _wrong(schedule: Schedule, stage: int, microbatch: int, has: set[Action]) -> ScheduleError:
    forward, back, grad, weight = (Action(stage, kind, microbatch) for kind in (F, B, I, W))
    rank = schedule.placement[stage]
    if forward not in has:
        return ScheduleError(f"rank {rank} never runs {forward}", hint=f"add {forward} to its row")
    split = [action for action in (grad, weight) if action in has]
    if back in has:
        return ScheduleError(
            f"rank {rank} runs both {back} and {split[0]}", hint=f"keep either {back}, or {grad} and {weight}"
        )
    missing = f"{back}, nor {grad} and {weight}" if not split else f"{weight if split == [grad] else grad}"
    add = missing if split else f"{back}"
    return ScheduleError(f"rank {rank} never runs {missing}", hint=f"add {add} to its row")


def _too_few(schedule: Schedule) -> ScheduleError:
    seen = {action for row in schedule.rows for action in row}
    if len(seen) < len(schedule.columns):
        return programs.repeated(schedule.rows)
    good = ({F, B}, {F, I, W}) if schedule.columns.trains else ({F},)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            has = {a for kind in (F, B, I, W) if (a := Action(stage, kind, microbatch)) in seen}
            if {action.kind for action in has} not in good:
                return _wrong(schedule, stage, microbatch, has)
    raise AssertionError("there is an action for every stage and micro-batch")


def order_on_rank(schedule: Schedule, flow: Flow) -> None:
    """In a row, what makes something stands before what uses it: F before B or I, I before W, and so on."""
    late: list[tuple[int, Milestone]] = []
    for need in entry_needs(schedule, flow):
        if need.code in TREATING or schedule.placement[need.source] != schedule.placement[need.stage]:
            continue
        wrong = (need.user >= 0) & ((need.maker < 0) | (need.maker > need.user))
        if wrong.any():
            microbatch = int(np.argmin(np.where(wrong, need.user, len(schedule.columns))))
            late.append((int(need.user[microbatch]), (need.source, microbatch, need.phase)))
    if late:
        entry, milestone = min(late, key=lambda one: one[0])
        rank, action = schedule.locate(entry)
        name = name_of(milestone, schedule)
        raise ScheduleError(
            f"rank {rank} runs {action} before {name}, which it needs",
            hint=f"move {name} in front of {action}",
        )


def slice_order(schedule: Schedule, flow: Flow) -> None:
    """Slices of one micro-batch: a forward reads what earlier slices left, a backward what later ones did."""
    k = schedule.slices
    if k == 1:
        return
    entries = []
    for code, step in ((F_, -1), (B_, 1), (I_, 1)):
        table = schedule.action_index.of(code).reshape(schedule.stages, -1, k)
        user, other = (table[..., 1:], table[..., :-1]) if step < 0 else (table[..., :-1], table[..., 1:])
        wrong = (user >= 0) & ((other < 0) | (other > user))
        entries += [(int(entry), step) for entry in user[wrong]]
    if entries:
        entry, step = min(entries)
        rank, action = schedule.locate(entry)
        late = Action(action.stage, action.kind, action.microbatch + step)
        raise ScheduleError(
            f"rank {rank} runs {action} before {late}, another slice of the same micro-batch",
            hint="run forwards of slices in order and their backwards in the opposite order",
        )


def progress(schedule: Schedule, flow: Flow) -> None:
    """Run all ranks: no rank waits for an action that can never happen."""
    columns, index, where = schedule.columns, schedule.action_index, schedule.placement
    far = [need for need in entry_needs(schedule, flow) if where[need.source] != where[need.stage]]
    counts = np.zeros((schedule.stages, len(columns.kinds)), np.int32)
    numbers = []  # of each need, among those of its action
    for need in far:
        numbers.append(int(counts[need.stage, need.code]))
        counts[need.stage, need.code] += 1
    first = starts_of(counts[columns.stage, columns.kind])
    needed = np.empty(first[-1], np.int32)
    for need, number in zip(far, numbers, strict=True):
        has = need.user >= 0
        needed[first[need.user[has]] + number] = need.maker[has]

    reached_by = (index.of(F_), index.gradients())  # per phase of a milestone

    def ready(entry: int, reached: Callable[[int], bool]) -> int:
        """Follows what is needed, and not reached, to its beginning: an action that needs nothing more."""
        while True:
            ahead = (int(reached_by[p][s, b]) for s, b, p in needs(schedule.locate(entry)[1], flow))
            lacking = next((needed for needed in ahead if not reached(needed)), None)
            if lacking is None:
                return entry
            entry = lacking

    prove_progress(Needs(columns.offsets, first, needed), lambda entry: str(columns.at(entry)), ready=ready)


def forwards_in_order(schedule: Schedule, updates: Mapping[int, str]) -> None:
    """A stage that updates a buffer runs its micro-batches in order, as one process does.

    updates: stage -> a buffer that its forward updates.
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


ORDERED = (OFFLOAD_, AWAIT_, RELOAD_, RECOMPUTE_)
"""Codes of what stands between F and the backward, in this order."""


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
    """What is offloaded is reloaded, and only that; and only that is waited for."""
    if not schedule.columns.treats_residuals:
        return
    index = schedule.action_index
    away, back, awaited = index.of(OFFLOAD_), index.of(RELOAD_), index.of(AWAIT_)
    if (lost := away[(away >= 0) & (back < 0)]).size:
        rank, action = schedule.locate(int(lost.min()))
        reader = schedule.locate(int(index.gradients()[action.stage, action.microbatch]))[1]
        reload = Action(action.stage, RELOAD, action.microbatch)
        raise ScheduleError(
            f"rank {rank} runs {action} and never {reload}",
            hint=f"add {reload} between {action} and {reader}",
        )
    lonely = np.where(awaited >= 0, awaited, back)
    if (lonely := lonely[(lonely >= 0) & (away < 0)]).size:
        rank, action = schedule.locate(int(lonely.min()))
        made, offload = (Action(action.stage, kind, action.microbatch) for kind in (F, OFFLOAD))
        raise ScheduleError(
            f"rank {rank} runs {action}, but nothing of it was offloaded",
            hint=f"add {offload} between {made} and {action}, or drop {action}",
        )


def in_order(schedule: Schedule, flow: Flow) -> None:
    """F, OFFLOAD, AWAIT, RELOAD, RECOMPUTE, and B or I of one micro-batch stand in this order."""
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
            hint=f"move {other} in front of {action}: the order is F, OFFLOAD, AWAIT, RELOAD, RECOMPUTE, "
            "B (or I)",
        )


def pairs(schedule: Schedule, flow: Flow) -> None:
    """The two of a pair stand next to each other in one row, in that order, and neither needs the other."""
    if not schedule.pairs:
        return
    place = {a: (rank, at) for rank, row in enumerate(schedule.rows) for at, a in enumerate(row)}
    used: set[Action] = set()
    for first, second in schedule.pairs:
        text = f"{first}&{second}"
        for action in (first, second):
            if action not in place:
                raise ScheduleError(f"no rank runs {action} of the pair {text}", hint=f"add {text} to a row")
            if action in used:
                raise ScheduleError(f"{action} is in two pairs", hint="pair each action once")
            used.add(action)
        rank, at = place[first]
        if place[second] != (rank, at + 1):
            raise ScheduleError(
                f"rank {rank} does not run {second} right after {first}, though {text} is a pair",
                hint=f"write {text} in the row of one rank",
            )
        if not set(produces(first)).isdisjoint(needs(second, flow)):
            raise ScheduleError(
                f"rank {rank} runs {text} as a pair, but {second} needs {first}",
                hint="pair actions that do not need each other, such as F and B of different micro-batches",
            )


def anchors(schedule: Schedule, flow: Flow) -> None:
    """An operation that a schedule has stands at every micro-batch that it is declared for, on the right
    side of its anchor, and nowhere else."""
    present = _operations(schedule)
    if not present:
        return
    for rank, row in enumerate(schedule.rows):
        place = {action: at for at, action in enumerate(row)}
        for operation in present.values():
            for anchor in row:
                if operation.stands_at(anchor.kind):
                    _check_anchored(rank, place, operation, anchor)
        for action in row:
            if action.kind in present and not present[action.kind].runs(
                action.stage, rank, action.microbatch
            ):
                raise ScheduleError(
                    f"rank {rank} runs {action}, but {action.kind} is not declared for it",
                    hint="drop it, or change stages=, ranks= or every= of the operation",
                )


def _check_anchored(rank: int, place: Mapping[Action, int], operation: Operation, anchor: Action) -> None:
    if not operation.runs(anchor.stage, rank, anchor.microbatch):
        return
    action = Action(anchor.stage, operation.kind, anchor.microbatch)
    follows = operation.after is not None
    if action not in place:
        side = "after" if follows else "before"
        raise ScheduleError(f"rank {rank} never runs {action}", hint=f"add it {side} {anchor}")
    if (place[action] > place[anchor]) != follows:
        side, where = ("before", "behind") if follows else ("after", "in front of")
        raise ScheduleError(
            f"rank {rank} runs {action} {side} {anchor}", hint=f"move {action} {where} {anchor}"
        )


def meetings(schedule: Schedule, flow: Flow) -> None:
    """No pair, no operation that meets others, and no stage on several ranks waits for what can never happen.

    Each action is two entries of the proof, as those that meet begin together: all of them come before any of
    them is done.

        entry 2e      its rank has come to action e: it needs what the action needs, and a pair what both need
        entry 2e + 1  action e is done: it needs that the ranks of all that it meets have come to theirs
    """
    present = {k: o for k, o in _operations(schedule).items() if o.meets is not None}
    if not present and not schedule.pairs and not flow.shards:
        return
    meeting = {action for row in schedule.rows for action in row if action.kind in present}
    for action in sorted(meeting):
        for other in meeting_actions(action, flow):
            if other not in meeting or action not in meeting_actions(other, flow):
                raise ScheduleError(
                    f"{action} meets {other}, which no rank runs or which does not meet it",
                    hint="let meets= name stages that have the operation, both ways",
                )
    second = dict(schedule.pairs)
    columns, index = schedule.columns, schedule.action_index
    reached_by = (index.of(F_), index.gradients())  # per phase of a milestone

    def entry_of(action: Action) -> int:
        return int(index.of(columns.kinds.index(action.kind))[action.stage, action.microbatch])

    first, needed = [0], list[int]()
    for row in schedule.rows:
        for action in row:
            members = (action, second[action]) if action in second else (action,)
            reached = (reached_by[p][s, b] for member in members for s, b, p in needs(member, flow))
            needed += [2 * int(entry) + 1 for entry in reached]
            first.append(len(needed))
            needed += [2 * entry_of(other) for other in meeting_actions(action, flow)]
            first.append(len(needed))
    prove_progress(
        Needs(2 * columns.offsets, np.array(first, np.int32), np.array(needed, np.int32)),
        lambda entry: str(columns.at(entry // 2)),
    )


def meeting_actions(action: Action, flow: Flow) -> Sequence[Action]:
    return [Action(s, action.kind, action.microbatch) for s in meets(action.stage, action.kind, flow)]


def _operations(schedule: Schedule) -> dict[Kind, Operation]:
    if not OPERATIONS:
        return {}
    columns = schedule.columns
    kinds = (columns.kinds[code] for code in np.unique(columns.kind))
    return {kind: OPERATIONS[kind] for kind in kinds if kind in OPERATIONS}


ADDED_RULES: tuple[Rule, ...] = (used, both_ways, in_order, pairs, anchors, meetings)
"""For what a schedule may have besides F, B, I and W; without them these rules cost nothing."""
PROGRAM_RULES: tuple[Rule, ...] = (
    placement,
    kinds_of_program,
    completeness,
    shards,
    order_on_rank,
    *ADDED_RULES,
)
RULES: tuple[Rule, ...] = (
    placement,
    ranks,
    kinds,
    completeness,
    shards,
    order_on_rank,
    slice_order,
    progress,
    *ADDED_RULES,
)
