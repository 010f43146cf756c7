"""Schedules as files: rows of text, and the CSV files of torch.distributed.pipelining.

Text has one row per rank, as `str(schedule)` prints it:

    0F0 0F1 0F2&0B0 0B1 0B2         blanks between actions, & between the two of a pair
    1F0 1B0 1COMPRESS0 1F1 1B1      kinds that a user declared are written like built-in ones

CSV has one row per rank, one action per cell:

    compute_only     0F0,0F1,0I0,0W0        full backwards are B
    compute_comms    the same with 0SEND_F0, 1RECV_F0, 1SEND_B0, 0RECV_B0, each next to what it serves,
                     and 0REDUCE_GRAD behind the last backward of a stage

A transfer there names only its own stage, since the stages of that runtime form a chain: the other end of
SEND_F is the next stage, of SEND_B the one before. Cells may be empty where a rank idles. The reader is
strict: what it does not know it refuses, with the row and the cell. It passes over what torch adds for
sharded parameters (UNSHARD, RESHARD, REDUCE_GRAD). A pair of F and B is one cell, (0F5;0B3)OVERLAP_F_B.
Copies to the host, which torch does not know, are written like any action: 0OFFLOAD3, 0AWAIT3, 0RELOAD3.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from ..ir.action import (
    COPYING,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    TRANSFERS,
    Action,
    B,
    F,
    I,
    Kind,
    W,
)
from ..ir.errors import ScheduleError, shown
from ..ir.schedule import Pair, Program, Schedule, parse_pairs, parse_rows


def parse_text(text: str, *, name: str = "text") -> Schedule:
    """Read rows of actions; the rank of a stage is the row that it stands in.

    Raises: ScheduleError if a word is no action, with its row; or a stage stands in two rows.
    """
    lines = tuple(line for line in text.splitlines() if line.strip())
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += parse_rows((line,))
        except ScheduleError as error:
            raise ScheduleError(f"row {number}: {error.message}", hint=error.hint) from None
    return from_rows(rows, parse_pairs(lines), name=name)


def from_rows(rows: Sequence[Sequence[Action]], pairs: Sequence[Pair], *, name: str) -> Schedule:
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if home.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} stands in the rows of ranks {home[action.stage]} and {rank}",
                    hint="give each stage one rank",
                )
    if not home:
        raise ScheduleError("there is no action in it", hint="write one row per rank, one action per cell")
    if missing := set(range(len(home))) - set(home):
        raise ScheduleError(
            f"no row has an action of stage {min(missing)}", hint="number the stages from 0 without gaps"
        )
    return Schedule(
        name=name,
        microbatches=1 + max(action.microbatch for row in rows for action in row),
        placement=tuple(home[s] for s in range(len(home))),
        rows=tuple(map(tuple, rows)),
        pairs=tuple(pairs),
    )


_KINDS = (F, B, I, W, *TRANSFERS, *COPYING)
_CELL = re.compile(rf"([0-9]{{1,9}})({'|'.join(_KINDS)})([0-9]{{1,9}})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_SHARDED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_PEER = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}


def schedule_text(schedule: Schedule) -> str:
    """The `compute_only` form."""
    return _text(schedule.rows, schedule.pairs)


def program_text(program: Program) -> str:
    """The `compute_comms` form; STEP is left out, as that runtime leaves it to the user.

    REDUCE_GRAD stands where torch itself would put it: there it divides gradients by the number of
    micro-batches (`scale_grads`), and without it they would be so many times too large.

    A RECV there posts a receive, which its action waits for, and messages between two ranks are matched in
    the order of posting: so receives are written in the order of the sends, if need be earlier than here.

    Raises: ScheduleError if a message does not go to a neighbour in the chain of stages.
    """
    rows = [_posting_in_order(program, rank) for rank in range(len(program.rows))]
    return _text([_with_reductions(row, program.pairs) for row in rows], program.pairs)


def _with_reductions(row: Sequence[Action], pairs: Sequence[Pair]) -> list[Action]:
    """A row with REDUCE behind the last B or W of each stage, but not between the two of a pair."""
    first = {pair[0]: pair[1] for pair in pairs}
    last = {step.stage: step for step in row if step.kind in (B, W)}
    behind = {step: stage for stage, step in last.items()}
    found: list[Action] = []
    held: list[Action] = []
    for step in row:
        found.append(step)
        if step in behind:
            held.append(Action(behind[step], REDUCE))
        if step not in first:
            found += held
            held.clear()
    return found


def _posting_in_order(program: Program, rank: int) -> list[Action]:
    left = {
        source: [send.other_end for send in reversed(sends)]
        for (source, target), sends in program.messages.items()
        if target == rank
    }
    posted: set[Action] = set()
    row: list[Action] = []
    for step in program.rows[rank]:
        if step.receives:
            waiting = left[program.placement[step.peer]]
            while step not in posted:
                row.append(early := waiting.pop())
                posted.add(early)
        elif not step.is_stage_wide:
            row.append(step)
    return row


def _text(rows: Sequence[Sequence[Action]], pairs: Sequence[Pair]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    second: dict[Action, Action] = dict(pairs)
    inner = set(second.values())
    for row in rows:
        writer.writerow([_cell(step, second.get(step)) for step in row if step not in inner])
    return file.getvalue()


def _cell(step: Action, second: Action | None) -> str:
    if second is not None:
        if (step.kind, second.kind) == (F, B):
            return f"({step};{second})OVERLAP_F_B"
        raise ScheduleError(
            f"torch's format has no pair {step}&{second}", hint="it knows pairs of F and B; drop the others"
        )
    if step.kind == REDUCE:
        return f"{step.stage}REDUCE_GRAD"
    if step.is_transfer:
        if step.peer - step.stage != _PEER[step.kind]:
            raise ScheduleError(
                f"{step} does not go to a neighbour in a chain of stages",
                hint="torch's format has no other transfers: write compute_only, or use a chain",
            )
        return f"{step.stage}{step.kind}{step.microbatch}"
    if step.kind in _KINDS:
        return str(step)
    raise ScheduleError(
        f"CSV files have no action {step}",
        hint="files know F, B, I, W, copies and transfers; drop the others",
    )


def read_schedule(path: Path, *, name: str = "") -> Schedule:
    """Read a file of either form without its transfers, which follow from the stages. A file that ends in
    .txt has rows as `str(schedule)` prints them, and may have declared operations too.

    Raises: ScheduleError if a cell cannot be read, a stage stands in two rows, or transfers do not fit.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ScheduleError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"cannot read {path}: it is no text", hint="give a CSV file of actions") from None
    if path.suffix == ".json":
        raise ScheduleError(
            f"{path} is no list of actions",
            hint=f"if it is a plan, `pipeloom simulate {path} MODEL` draws its step",
        )
    parse = parse_text if path.suffix.lower() == ".txt" else parse_schedule
    try:
        return parse(text, name=name or path.stem)
    except ScheduleError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from None


def parse_schedule(text: str, *, name: str = "csv") -> Schedule:
    steps: list[list[Action]] = []
    pairs: list[Pair] = []
    try:
        cells = list(csv.reader(io.StringIO(text, newline=None)))
    except csv.Error as error:
        raise ScheduleError(
            f"this is no CSV text: {error}", hint="write one row per rank, its actions separated by commas"
        ) from None
    for rank, line in enumerate(cells):
        steps.append([])
        for column, cell in enumerate(line):
            actions = _read(cell.strip(), rank, column)
            steps[rank] += actions
            if len(actions) == 2:
                pairs.append((actions[0], actions[1]))
    rows = [[step for step in row if not step.is_transfer] for row in steps]
    schedule = from_rows(rows, pairs, name=name)
    if rows != steps:
        _refuse_transfers(steps, schedule)
    return schedule


def _refuse_transfers(steps: Sequence[Sequence[Action]], schedule: Schedule) -> None:
    """Those of a file are not run here, but elsewhere they would be: they must be those of the chain."""
    messages: dict[bool, dict[tuple[int, int], list[Action]]] = {True: {}, False: {}}
    made = set[tuple[int, Kind, int]]()
    for rank, row in enumerate(steps):
        for step in row:
            kind = F if step.kind in (F, SEND_F, RECV_F) else I if step.kind in (B, I, SEND_B, RECV_B) else W
            if not step.is_transfer:
                made.add((step.stage, kind, step.microbatch))
                continue
            if not 0 <= step.peer < schedule.stages or schedule.placement[step.peer] == rank:
                raise ScheduleError(f"{step} has no other end", hint="see whether a rank's row is missing")
            if ((step.stage, kind, step.microbatch) in made) != step.sends:
                raise ScheduleError(
                    f"{step} stands in the wrong place in the row of rank {rank}",
                    hint="sends go behind what makes them, receives in front of what reads them",
                )
            peer = schedule.placement[step.peer]
            ends, message = ((rank, peer), step) if step.sends else ((peer, rank), step.other_end)
            messages[step.sends].setdefault(ends, []).append(message)
    for source, target in sorted(messages[True].keys() | messages[False].keys()):
        sent, received = (messages[sends].get((source, target), []) for sends in (True, False))
        count = schedule.microbatches * len({(step.stage, step.kind) for step in (*sent, *received)})
        if sent != received or len(set(sent)) != count:
            raise ScheduleError(
                f"rank {source} sends {len(sent)} messages to rank {target}, which receives "
                f"{len(received)}, others or in another order",
                hint="leave all transfers out: they follow from the stages; or let `export --transfers` "
                "write them",
            )


def _read(cell: str, rank: int, column: int) -> list[Action]:
    """The actions of one cell: none for an empty one, two for an overlapped pair."""
    if not cell or _SHARDED.fullmatch(cell):
        return []
    if pair := _OVERLAP.fullmatch(cell):
        return [action for part in pair.groups() for action in _read(part.strip(), rank, column)]
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"row {rank + 1}, cell {column + 1}: cannot read {shown(cell)}",
            hint="write stage, kind, micro-batch, as in 2F5; the kinds are F, B, I, W, copies, transfers",
        )
    stage, kind = int(match[1]), Kind(match[2])
    return [Action(stage, kind, int(match[3]), stage + _PEER[kind] if kind in _PEER else -1)]
