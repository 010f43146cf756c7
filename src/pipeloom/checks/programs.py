"""Rules for programs, one function each: transfers, reductions, optimizer steps, and that nothing blocks.

The rules for compute actions (see `check`) are taken to hold already. Rules read the columns of a program,
not its steps one by one, and take time linear in their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..ir.action import (
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    STEP,
    TRANSFERS,
    Action,
    B,
    F,
    Kind,
)
from ..ir.columns import F_, RECV_B_, RECV_F_, REDUCE_, STEP_, Ints, Longs, starts_of
from ..ir.dependencies import entry_needs, meets
from ..ir.errors import ScheduleError
from ..ir.flow import Flow
from ..ir.message_index import NO_ROUTE
from ..ir.operation import writes_gradients
from ..ir.schedule import Program
from ..ir.shared_weights import reductions
from ..ir.stages import StageGraph
from .deadlock import Needs, prove_progress

Rule: TypeAlias = Callable[[Program, StageGraph, Flow], None]


def ends(program: Program, stages: StageGraph, flow: Flow) -> None:
    """Every transfer stands on its stage's rank and follows an edge of the stage graph to another rank."""
    columns, routes = program.columns, program.message_index(flow).route
    homes = np.array(program.placement, np.int32)
    last = len(homes) - 1
    for rank, (low, high) in enumerate(pairwise(columns.offsets.tolist())):
        entries = low + np.flatnonzero(~columns.is_compute[low:high])
        stage, peer, route = columns.stage[entries], columns.peer[entries], routes[entries]
        microbatch = columns.microbatch[entries]
        strange = (stage < 0) | (stage > last) | (homes[np.clip(stage, 0, last)] != rank)
        astray = route == NO_ROUTE
        local = (route >= 0) & (homes[np.clip(peer, 0, last)] == rank)
        late = (route != -1) & ((microbatch < 0) | (microbatch >= program.microbatches))
        wrong = np.flatnonzero(strange | astray | local | late)
        if not len(wrong):
            continue
        at = wrong[0]
        step = columns.at(int(entries[at]))
        if strange[at]:
            why, hint = f"does not hold stage {step.stage}", "move it to the rank of that stage, or drop it"
        elif astray[at]:
            what = "gradients" if step.kind in (SEND_B, RECV_B) else "values"
            why, hint = f"no {what} pass that way from stage to stage", "drop it and its other end"
        elif local[at]:
            why, hint = "holds both stages", "drop it and its other end: stages on one rank share memory"
        else:
            why = f"the micro-batches are 0 to {program.microbatches - 1}"
            hint = "correct the micro-batch, or drop it and its other end"
        raise ScheduleError(f"rank {rank} runs {step}, but {why}", hint=hint)


def pairing(program: Program, stages: StageGraph, flow: Flow) -> None:
    """Every SEND has its RECV and every RECV its SEND, once each; nothing is left over."""
    messages = program.message_index(flow)
    has = [table >= 0 for table in (messages.sent, messages.received)]
    if sum(map(np.count_nonzero, has)) < np.count_nonzero(program.columns.is_transfer):
        raise repeated([[step for step in row if step.kind in TRANSFERS] for row in program.rows])
    lonely = has[0] != has[1]
    if lonely.any():
        alone = np.where(has[0], messages.sent, messages.received)[lonely]
        rank, step = program.locate(int(alone.min()))
        other = program.placement[step.peer]
        raise ScheduleError(
            f"rank {rank} runs {step}, but rank {other} never runs {step.other_end}",
            hint=f"add {step.other_end} to rank {other}, or drop {step}",
        )


def repeated(rows: Sequence[Sequence[Action]]) -> ScheduleError:
    seen: set[Action] = set()
    for rank, row in enumerate(rows):
        for step in row:
            if step in seen:
                return ScheduleError(f"rank {rank} runs {step} twice", hint="remove one of them")
            seen.add(step)
    raise AssertionError("nothing stands twice")


def data_in_place(program: Program, stages: StageGraph, flow: Flow) -> None:
    """A RECV stands before the action that uses it, and a SEND after the action that makes it."""
    first: tuple[int, Action] | None = None
    for user, maker, stage, kind, peer in _uses(program, flow):
        wrong = (user >= 0) & ((maker < 0) | (maker > user))
        if wrong.any():
            microbatch = int(np.argmin(np.where(wrong, user, len(program.columns))))
            if first is None or user[microbatch] < first[0]:
                first = int(user[microbatch]), Action(stage, kind, microbatch, peer)
    if first is not None:
        rank, step = program.locate(first[0])
        raise ScheduleError(
            f"rank {rank} runs {step} without {first[1]} before it", hint=f"put {first[1]} in front of {step}"
        )


def _uses(program: Program, flow: Flow) -> Iterator[tuple[Ints, Ints, int, Kind, int]]:
    """Per micro-batch the entries of a step and of what it uses in its own row, and what that is: stage,
    kind, and peer, or -1 for a compute action."""
    messages, where = program.message_index(flow), program.placement
    routes, forward, back = messages.routes, program.action_index.of(F_), program.action_index.gradients()
    for need in entry_needs(program, flow):
        if where[need.source] != where[need.stage]:
            route = routes.between(need.source, need.stage, backward=bool(need.phase))
            kind = RECV_B if need.phase else RECV_F
            yield need.user, messages.received[route], need.stage, kind, need.source
    for route, stage in enumerate(routes.sender.tolist()):
        kind, made = (B, back) if routes.backward[route] else (F, forward)
        yield messages.sent[route], made[stage], stage, kind, -1


def optimizer(program: Program, stages: StageGraph, flow: Flow) -> None:
    """In training one STEP per stage and update, and one REDUCE per rank that sums something in front."""
    columns = program.columns
    wanted = _optimizer_steps(program, stages) if columns.trains else [[] for _ in range(columns.ranks)]
    entries = np.flatnonzero((columns.kind == REDUCE_) | (columns.kind == STEP_))
    parts = np.split(entries, np.searchsorted(entries, columns.offsets[1:-1]))
    adding = _adding(program)
    for rank, part in enumerate(parts):
        closing = [columns.at(entry) for entry in part.tolist()]
        allowed, present = set(wanted[rank]), set(closing)
        for step in closing:
            if step not in allowed:
                raise ScheduleError(
                    f"rank {rank} runs {step}, which has nothing to do there",
                    hint="drop it: each trained stage has a STEP; a rank with tied parameters has a REDUCE, "
                    "on its lowest such stage",
                )
        for wish in wanted[rank]:
            if wish not in present:
                raise ScheduleError(f"rank {rank} never runs {wish}", hint="add it at the end of the row")
        if len(closing) > len(present):
            twice = next(step for step in wanted[rank] if closing.count(step) > 1)
            raise ScheduleError(f"rank {rank} runs {twice} twice", hint="remove one of them")
        of_update: dict[int, list[int]] = {}
        for at, step in enumerate(closing):
            of_update.setdefault(step.microbatch, []).append(at)
        for update, mine in of_update.items():
            begin = int(part[mine[0]])
            _closes(program, rank, [closing[at] for at in mine], begin, adding[rank][update])


def _optimizer_steps(program: Program, stages: StageGraph) -> list[list[Action]]:
    summed = {stage for readers in stages.tied.values() for stage in readers}
    if program.clips:
        summed = set(range(len(program.placement)))
    steps: list[list[Action]] = [[] for _ in range(program.columns.ranks)]
    sums: set[int] = set()
    for stage, rank in enumerate(program.placement):
        if stage in summed and rank not in sums:
            sums.add(rank)
            steps[rank] += [Action(stage, REDUCE, update) for update in program.updates]
        steps[rank] += [Action(stage, STEP, update) for update in program.updates]
    return steps


def _adding(program: Program) -> list[dict[int, Longs]]:
    """Per rank and update the entries that add to its gradients: of the only update all compute actions."""
    columns, every = program.columns, program.every
    adds, update = columns.is_compute, np.full(len(columns), -1)
    if every is not None:
        adds = columns.among(code for code, kind in enumerate(columns.kinds) if writes_gradients(kind))
        update = columns.microbatch // every
    found = []
    for low, high in pairwise(columns.offsets.tolist()):
        entries = low + np.flatnonzero(adds[low:high])
        entries = entries[np.argsort(update[entries], kind="stable")]
        firsts, ends = (np.searchsorted(update[entries], program.updates, side) for side in ("left", "right"))
        spans = zip(program.updates, firsts.tolist(), ends.tolist(), strict=True)
        found.append({number: entries[first:end] for number, first, end in spans})
    return found


def _closes(program: Program, rank: int, closing: list[Action], begin: int, adds: Longs) -> None:
    """REDUCE before any STEP, and both behind all that adds to the gradients of their update."""
    kinds = [step.kind for step in closing]
    if REDUCE in kinds[1:]:
        late = closing[kinds.index(REDUCE)]
        raise ScheduleError(f"rank {rank} runs {late} after {closing[0]}", hint=f"move {late} in front of it")
    behind = adds[adds > begin]
    if len(behind):
        step = program.columns.at(int(behind[0]))
        raise ScheduleError(
            f"rank {rank} runs {closing[0]} before {step}", hint=f"move {closing[0]} behind {step}"
        )


def progress(program: Program, stages: StageGraph, flow: Flow) -> None:
    """Run all ranks with asynchronous sends: every RECV and every REDUCE meets its other ends, and so do
    the shards of a stage on several ranks, and operations that meet others."""
    columns, messages = program.columns, program.message_index(flow)
    receives = (columns.kind == RECV_F_) | (columns.kind == RECV_B_)
    counts = receives.astype(np.int32)
    meeting = {**_meeting_reductions(program, stages), **_meeting_actions(program, flow)}
    for entry, others in meeting.items():
        counts[entry] = len(others)
    first = starts_of(counts)
    needed = np.empty(first[-1], np.int32)
    entries = np.flatnonzero(receives)
    needed[first[entries]] = messages.sent[messages.route[entries], columns.microbatch[entries]]
    for entry, others in meeting.items():
        needed[first[entry] : first[entry + 1]] = others
    prove_progress(
        Needs(columns.offsets, first, needed),
        lambda entry: str(columns.at(entry)),
        # A REDUCE needs the entry in front of another one: they meet where both ranks have come to them.
        name_need=lambda at, need: str(columns.at(need + 1 if columns.kind[at] == REDUCE_ else need)),
    )


def _meeting_actions(program: Program, flow: Flow) -> dict[int, list[int]]:
    """Entry of each F, B and I of a shard, and of each operation that meets others -> the entries in front of
    those that it begins together with."""
    meeting: dict[int, list[int]] = {}
    starts = set(program.columns.offsets.tolist())
    for code, kind in enumerate(program.columns.kinds):
        for stage in range(len(program.placement)):
            if others := meets(stage, kind, flow):
                table = program.action_index.of(code)
                for microbatch, entry in enumerate(table[stage].tolist()):
                    if entry >= 0:
                        # Another rank has come to its entry once it has passed the one in front, and at the
                        # beginning of its row it has.
                        ends = [int(table[other, microbatch]) for other in others]
                        meeting[entry] = [end - 1 for end in ends if end not in starts]
    return meeting


def _meeting_reductions(program: Program, stages: StageGraph) -> dict[int, list[int]]:
    """Entry of each REDUCE -> the entries in front of those that it meets: it begins all its sums and waits
    for them. In a program of several updates a REDUCE only begins its sums; there the STEP needs the REDUCEs
    of the others."""
    columns = program.columns
    together: dict[int, set[int]] = {}
    for rank, row in enumerate(reductions(stages, program.placement)):
        together[rank] = {other for reduction in row for other in reduction.ranks}
    if program.clips and program.every is not None:
        together = dict.fromkeys(range(columns.ranks), set(range(columns.ranks)))

    def entries(code: int) -> dict[tuple[int, int], int]:
        """(rank, update) -> entry."""
        at = np.flatnonzero(columns.kind == code).tolist()
        return {(columns.rank_of(entry), int(columns.microbatch[entry])): entry for entry in at}

    sums = entries(REDUCE_)
    needs: dict[int, list[int]] = {}
    for (rank, update), entry in (sums if program.every is None else entries(STEP_)).items():
        others = sorted(together.get(rank, set()) - {rank})
        met = [(other, sums[other, update]) for other in others if (other, update) in sums]
        if program.every is None:
            needs[entry] = [at - 1 for other, at in met if at > columns.offsets[other]]
        elif met:
            needs[entry] = [at for _, at in met]
    return needs


RULES: tuple[Rule, ...] = (ends, pairing, data_in_place, optimizer, progress)
