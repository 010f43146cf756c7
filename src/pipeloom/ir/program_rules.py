"""Rules for programs, one function each: transfers, reductions, optimizer steps, and that nothing blocks.

The rules for compute actions (see `check`) are taken to hold already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from .action import (
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    STEP,
    Action,
    B,
    F,
    I,
    Instruction,
    Kind,
    StageAction,
    Transfer,
    W,
)  # fmt: skip
from .board import Board, Process, Stuck, deadlock
from .errors import ScheduleError
from .flow import Flow
from .schedule import Program
from .stages import StageGraph
from .ties import reductions

Rule: TypeAlias = Callable[[Program, StageGraph, Flow], None]


def ends(program: Program, stages: StageGraph, flow: Flow) -> None:
    """Every transfer stands on its stage's rank and follows an edge of the stage graph to another rank."""
    for rank, row in enumerate(program.rows):
        for step in row:
            if isinstance(step, Action):
                continue
            if not 0 <= step.stage < len(program.placement) or program.placement[step.stage] != rank:
                raise ScheduleError(
                    f"rank {rank} runs {step}, but does not hold stage {step.stage}",
                    hint="move it to the rank of that stage, or drop it",
                )
            if isinstance(step, Transfer):
                _follows_edge(rank, step, program, flow)


def _follows_edge(rank: int, step: Transfer, program: Program, flow: Flow) -> None:
    peers: Mapping[Kind, tuple[tuple[int, ...], ...]] = {
        SEND_F: flow.read_by, RECV_F: flow.reads_from,
        SEND_B: flow.gradients_to, RECV_B: flow.gradients_from,
    }  # fmt: skip
    if step.kind not in peers or step.peer not in peers[step.kind][step.stage]:
        what = "gradients" if step.kind in (SEND_B, RECV_B) else "values"
        raise ScheduleError(
            f"rank {rank} runs {step}, but no {what} pass that way from stage to stage",
            hint="drop it and its other end",
        )
    if program.placement[step.peer] == rank:
        raise ScheduleError(
            f"rank {rank} runs {step}, but holds both stages",
            hint="drop it and its other end: stages on one rank share memory",
        )


def pairing(program: Program, stages: StageGraph, flow: Flow) -> None:
    """Every SEND has its RECV and every RECV its SEND, once each; nothing is left over."""
    home: dict[Transfer, int] = {}
    for rank, row in enumerate(program.rows):
        for step in row:
            if isinstance(step, Transfer):
                if step in home:
                    raise ScheduleError(f"rank {rank} runs {step} twice", hint="remove one of them")
                home[step] = rank
    for step, rank in home.items():
        if step.other_end not in home:
            other = program.placement[step.peer]
            raise ScheduleError(
                f"rank {rank} runs {step}, but rank {other} never runs {step.other_end}",
                hint=f"add {step.other_end} to rank {other}, or drop {step}",
            )


def data_in_place(program: Program, stages: StageGraph, flow: Flow) -> None:
    """A RECV stands before the action that uses it, and a SEND after the action that makes it."""
    for rank, row in enumerate(program.rows):
        done: set[Action | Transfer] = set()
        for step in row:
            if isinstance(step, StageAction):
                continue
            for options in _uses(step, rank, program, flow):
                if not any(option in done for option in options):
                    raise ScheduleError(
                        f"rank {rank} runs {step} without {options[0]} before it",
                        hint=f"put {options[0]} in front of {step}",
                    )
            done.add(step)


def _uses(
    step: Action | Transfer, rank: int, program: Program, flow: Flow
) -> list[tuple[Action | Transfer, ...]]:
    """For each thing that a step uses the steps of its own row that can provide it."""
    stage, microbatch = step.stage, step.microbatch

    def elsewhere(peers: tuple[int, ...], kind: Kind) -> list[tuple[Action | Transfer, ...]]:
        far = [peer for peer in peers if program.placement[peer] != rank]
        return [(Transfer(stage, kind, microbatch, peer),) for peer in far]

    if step.kind == F:
        return elsewhere(flow.reads_from[stage], RECV_F)
    if step.kind in (B, I):
        return elsewhere(flow.gradients_from[stage], RECV_B)
    if step.kind == SEND_F:
        return [(Action(stage, F, microbatch),)]
    if step.kind == SEND_B:
        return [(Action(stage, B, microbatch), Action(stage, I, microbatch))]
    return []


def optimizer(program: Program, stages: StageGraph, flow: Flow) -> None:
    """In training one STEP per stage, and one REDUCE per rank with tied parameters in front of them."""
    training = any(isinstance(s, Action) and s.kind in (B, I, W) for row in program.rows for s in row)
    wanted = _optimizer_steps(program, stages) if training else [[] for _ in program.rows]
    for rank, row in enumerate(program.rows):
        found = [step for step in row if isinstance(step, StageAction)]
        for step in found:
            if step not in wanted[rank]:
                raise ScheduleError(
                    f"rank {rank} runs {step}, which has nothing to do there",
                    hint="drop it: each trained stage has a STEP; a rank with tied parameters has a REDUCE, "
                    "on its lowest such stage",
                )
        for step in wanted[rank]:
            if step not in found:
                raise ScheduleError(f"rank {rank} never runs {step}", hint="add it at the end of the row")
            if found.count(step) > 1:
                raise ScheduleError(f"rank {rank} runs {step} twice", hint="remove one of them")
        _closes(rank, row, found)


def _optimizer_steps(program: Program, stages: StageGraph) -> list[list[StageAction]]:
    tied = {stage for readers in stages.tied.values() for stage in readers}
    steps: list[list[StageAction]] = [[] for _ in program.rows]
    for stage, rank in enumerate(program.placement):
        if stage in tied and not any(step.kind == REDUCE for step in steps[rank]):
            steps[rank].append(StageAction(stage, REDUCE))
        steps[rank].append(StageAction(stage, STEP))
    return steps


def _closes(rank: int, row: tuple[Instruction, ...], found: list[StageAction]) -> None:
    """REDUCE before any STEP, and both behind all compute actions, as those add to the gradients."""
    kinds = [step.kind for step in found]
    if REDUCE in kinds[1:]:
        late = found[kinds.index(REDUCE)]
        raise ScheduleError(f"rank {rank} runs {late} after {found[0]}", hint=f"move {late} in front of it")
    begun: StageAction | None = None
    for step in row:
        if isinstance(step, StageAction):
            begun = begun or step
        elif isinstance(step, Action) and begun is not None:
            raise ScheduleError(f"rank {rank} runs {begun} before {step}", hint=f"move {begun} behind {step}")


def progress(program: Program, stages: StageGraph, flow: Flow) -> None:
    """Run all ranks with asynchronous sends: every RECV and every REDUCE meets its other ends."""
    board = Board()
    at: dict[int, str] = {}
    sums = reductions(stages, program.placement)

    def run(rank: int) -> Process:
        for step in program.rows[rank]:
            at[rank] = str(step)
            if isinstance(step, Transfer):
                if step.sends:
                    board.post(step)
                else:
                    yield from board.wait(step.other_end)
            elif step.kind == REDUCE:
                for reduction in sums[rank]:
                    board.post((reduction.name, rank))
                    for other in reduction.ranks:
                        yield from board.wait((reduction.name, other))

    lacking = board.run([run(rank) for rank in range(len(program.rows))])
    if not lacking:
        return
    stuck = []
    for rank, key in lacking.items():
        if isinstance(key, Transfer):
            needs, holder = str(key), program.placement[key.stage]
        else:
            assert isinstance(key, tuple)
            holder = key[1]
            needs = next(str(step) for step in program.rows[holder] if step.kind == REDUCE)
        stuck.append(Stuck(rank=rank, at=at[rank], needs=needs, holder=holder))
    raise deadlock(stuck)


RULES: tuple[Rule, ...] = (ends, pairing, data_in_place, optimizer, progress)


def receives_ahead(program: Program) -> dict[tuple[int, int], int]:
    """(from rank, to rank) -> receives that must be posted at once so that every wait can be met.

    Messages arrive in the sender's order. A receiver that waits for the third one first needs three
    posted; one that waits in the sender's order needs one.

    >>> from pipeloom.ir.schedule import parse_program
    >>> rows = ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F1<0 1F1 1RECV_F0<0 1F0")
    >>> receives_ahead(parse_program(2, (0, 1), rows))
    {(0, 1): 2}
    """
    place: dict[Transfer, tuple[tuple[int, int], int]] = {}
    for pair, sends in program.messages.items():
        for index, send in enumerate(sends):
            assert isinstance(send, Transfer)
            place[send.other_end] = (pair, index)
    waited: dict[tuple[int, int], int] = {}
    most: dict[tuple[int, int], int] = {}
    for row in program.rows:
        for step in row:
            if isinstance(step, Transfer) and not step.sends:
                pair, index = place[step]
                most[pair] = max(most.get(pair, 1), index + 1 - waited.get(pair, 0))
                waited[pair] = waited.get(pair, 0) + 1
    return most
