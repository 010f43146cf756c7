"""Hypothesis strategies: valid schedules of every family on chains and DAGs, and random edits of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import strategies as st
from slow_check import TREATED, makes, stuck, wants

from pipeloom.ir.action import Action, B, F, I, Kind, W
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.operation import Operation, declare
from pipeloom.ir.schedule import Pair, Program, Schedule
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.schedules import registry
from pipeloom.schedules.language import placements


@dataclass(frozen=True)
class Case:
    """A valid schedule."""

    stages: StageGraph
    schedule: Schedule

    def __repr__(self) -> str:
        edges = sorted(self.stages.between)
        return f"{self.schedule.name} on {self.schedule.placement}, edges {edges}\n{self.schedule}"


@cache
def from_library(name: str, ranks: int, chunks: int, microbatches: int, split: bool) -> Case | None:
    """A schedule of the library in its usual placement; None if it does not fit this shape."""
    stages, placement = registry.default_placement(name, ranks, chunks)
    try:
        return Case(stages, registry.build(name, stages, placement, microbatches, split_backward=split))
    except ScheduleError as error:
        assert error.hint
        return None


@st.composite
def library_cases(draw: st.DrawFn) -> Case:
    """Any family, on a chain; those that do not fit the shape drawn give way to GPipe on it."""
    name = draw(st.sampled_from(registry.names()))
    place = registry.entry(name).place
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if place in ("loop", "wave") else 1
    count = draw(st.integers(1, 5))
    split = draw(st.booleans())
    found = from_library(name, ranks, chunks, count, split)
    instead = "looped_bfs" if place == "loop" else "gpipe"
    found = found or from_library(instead, ranks, 2 if place == "loop" else 1, count, split)
    assert found is not None
    return found


@st.composite
def dag_cases(draw: st.DrawFn) -> Case:
    """A DAG whose stages all reach the loss, in any numbering, on any placement; some parameters tied."""
    count = draw(st.integers(1, 6))
    label = draw(st.permutations(range(count)))
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    some = st.frozensets(st.sampled_from(pairs)) if pairs else st.just(frozenset())
    chosen = draw(some)
    chosen |= {(i, count - 1) for i in range(count - 1) if not any(a == i for a, _ in chosen)}
    edges = [(label[a], label[b]) for a, b in sorted(chosen)]
    without = draw(st.frozensets(st.sampled_from(edges), max_size=3)) if edges else ()
    tied = draw(st.frozensets(st.tuples(st.integers(0, count - 1), st.sampled_from("xyz")), max_size=5))
    params = {s: tuple(sorted(name for at, name in tied if at == s)) for s in range(count)}
    size = 4 * draw(st.integers(1, 5))
    stages = dag(count, edges, loss_stage=label[-1], no_gradient=without, value_bytes=size, params=params)
    ranks = draw(st.integers(1, count))
    placement = tuple(draw(st.permutations([stage % ranks for stage in range(count)])))
    name = draw(st.sampled_from(["gpipe", "1f1b", "forward_only"]))
    microbatches, splits = draw(st.integers(1, 5)), draw(st.booleans())
    return Case(stages, registry.build(name, stages, placement, microbatches, split_backward=splits))


@st.composite
def shard_cases(draw: st.DrawFn) -> Case:
    """A chain in which some stages span two ranks."""
    wide = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    table: list[int | tuple[int, ...]] = []
    ranks = 0
    for both in wide:
        table.append((ranks, ranks + 1) if both else ranks)
        ranks += 1 + both
    stages, placement = placements.spread(chain(len(wide)), table)
    name = draw(st.sampled_from(["gpipe", "1f1b"]))
    count, split = draw(st.integers(1, 4)), draw(st.booleans())
    return Case(stages, registry.build(name, stages, placement, count, split_backward=split))


SWAP: dict[str, Any] = {"stages": lambda s: s < 2, "seconds": 1.0, "meets": lambda s: (1 - s,)}
ADDED = (
    declare(Operation(letters="NOTE", meaning="behind each F", after=F, seconds=0.5)),
    declare(Operation(letters="PACK", meaning="behind every second W", after=W, every=2, share=0.25)),
    declare(Operation(letters="WARM", meaning="in front of each B", before=B, ahead=1, stream="host")),
    declare(Operation(letters="SWAP", meaning="stages 0 and 1 meet", after=F, **SWAP)),
)
"""Operations that a user may have declared."""


def _beside(draw: st.DrawFn, row: list[Action], rank: int, operation: Operation, tied: set[Pair]) -> None:
    """Put an operation somewhere on the right side of each anchor of a row, but not into a pair."""
    for anchor in [a for a in row if operation.stands_at(a.kind)]:
        if operation.runs(anchor.stage, rank, anchor.microbatch):
            at, follows = row.index(anchor), operation.after is not None
            span = range(at + 1, len(row) + 1) if follows else range(at + 1)
            free = [i for i in span if not 0 < i < len(row) or (row[i - 1], row[i]) not in tied]
            near = st.just(free[0 if follows else -1])
            where = draw(near | st.sampled_from(free))
            row.insert(where, Action(anchor.stage, operation.kind, anchor.microbatch))


def with_operations(draw: st.DrawFn, case: Case) -> Case:
    """Operations in a schedule; those that meet others in a way that blocks are left out."""
    for operation in draw(st.lists(st.sampled_from(ADDED), min_size=1, max_size=3, unique=True)):
        rows = [list(row) for row in case.schedule.rows]
        if operation.meets is None or len(case.stages.stages) > 1:
            for rank, row in enumerate(rows):
                _beside(draw, row, rank, operation, set(case.schedule.pairs))
        added = replace(case.schedule, rows=tuple(map(tuple, rows)))
        if not stuck(added, case.stages):
            case = Case(case.stages, added)
    return case


def _waits(action: Action, before: Action, stages: StageGraph) -> bool:
    """Whether an action needs the one before it. Of one micro-batch and stage, a copy and whatever stands
    beside it do."""
    copied = {action.kind, before.kind} & set(TREATED)
    same = (action.stage, action.microbatch) == (before.stage, before.microbatch)
    return bool(makes(before) & wants(action, stages)) or bool(copied and same)


def with_pairs(draw: st.DrawFn, case: Case) -> Case:
    """Some neighbours of a schedule as pairs, of one stage or of two, that block nothing."""
    for _ in range(draw(st.integers(1, 4))):
        used = {a for pair in case.schedule.pairs for a in pair}
        near = [pair for row in case.schedule.rows for pair in zip(row, row[1:], strict=False)]
        near = [(a, b) for a, b in near if not {a, b} & used and not _waits(b, a, case.stages)]
        if near:
            apart = [(a, b) for a, b in near if a.stage != b.stage]
            pair = draw(st.sampled_from(near) | st.sampled_from(apart or near))
            paired = replace(case.schedule, pairs=(*case.schedule.pairs, pair))
            if not stuck(paired, case.stages):
                case = Case(case.stages, paired)
    return case


@st.composite
def operation_cases(draw: st.DrawFn) -> Case:
    return with_operations(draw, draw(st.one_of(library_cases(), dag_cases())))


@st.composite
def paired_cases(draw: st.DrawFn) -> Case:
    return with_pairs(draw, draw(st.one_of(library_cases(), dag_cases())))


def cases() -> st.SearchStrategy[Case]:
    library = library_cases()
    return st.one_of(library, library, dag_cases(), shard_cases(), operation_cases(), paired_cases())


Table = list[list[Any]]
Edit = Callable[[st.DrawFn, Table, int, int], None]
"""Changes rows in place: something at a rank and a place in its row, or elsewhere."""


def _place(draw: st.DrawFn, rows: Table) -> tuple[int, int]:
    rank = draw(st.sampled_from([r for r, row in enumerate(rows) if row]))
    return rank, draw(st.integers(0, len(rows[rank]) - 1))


def _put(draw: st.DrawFn, row: list[Any], step: Any) -> None:
    row.insert(draw(st.integers(0, len(row))), step)


def next_to_next(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    row, other = rows[rank], min(at + 1, len(rows[rank]) - 1)
    row[at], row[other] = row[other], row[at]


def swap(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    row, other = rows[rank], draw(st.integers(0, len(rows[rank]) - 1))
    row[at], row[other] = row[other], row[at]


def delete(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    del rows[rank][at]


def duplicate(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    _put(draw, rows[rank], rows[rank][at])


def move(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    _put(draw, rows[rank], rows[rank].pop(at))


def move_away(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    _put(draw, draw(st.sampled_from(rows)), rows[rank].pop(at))


def rotate(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    rows[rank][:] = rows[rank][at:] + rows[rank][:at]


def swap_rows(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    other, _ = _place(draw, rows)
    rows[rank], rows[other] = rows[other], rows[rank]


def rename(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    """Two micro-batches change their names on all ranks: what was valid stays so, but for slices."""
    a, b = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    names = {a: b, b: a}
    for row in rows:
        row[:] = [replace(s, microbatch=names.get(s.microbatch, s.microbatch)) for s in row]


def other_number(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    names = ["microbatch", "stage", *(["peer"] if rows[rank][at].is_transfer else [])]
    rows[rank][at] = replace(rows[rank][at], **{draw(st.sampled_from(names)): draw(st.integers(0, 9))})


def other_kind(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    step = rows[rank][at]
    kinds = "F B I W OFFLOAD AWAIT RELOAD RECOMPUTE".split() + [operation.kind for operation in ADDED]
    if step.is_stage_wide:
        kinds = ["STEP", "REDUCE"]
    elif step.is_transfer:
        kinds = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
    rows[rank][at] = replace(step, kind=Kind(draw(st.sampled_from(kinds))))


def split(draw: st.DrawFn, rows: Table, rank: int, at: int) -> None:
    """A B becomes I and, anywhere behind it, W: still valid."""
    row, step = rows[rank], rows[rank][at]
    if step.kind == B:
        row[at] = replace(step, kind=I)
        last = len(row) if not any(s.is_stage_wide for s in row) else at + 1
        row.insert(draw(st.integers(at + 1, last)), replace(step, kind=W))


_EDITS = (next_to_next, swap, delete, duplicate, move, move_away, rotate, swap_rows, rename)
EDITS: dict[str, Edit] = {e.__name__: e for e in (*_EDITS, other_number, other_kind, split)}

OFTEN = ("next_to_next", "swap", "move")
"""Edits that leave everything there, so that the order alone decides."""

NAMES = st.lists(st.sampled_from(sorted(EDITS)) | st.sampled_from(OFTEN), min_size=1, max_size=3)


def edited_rows(draw: st.DrawFn, rows: Any, names: list[str]) -> Any:
    """Rows after some edits."""
    table = [list(row) for row in rows]
    for name in names:
        if any(table):
            EDITS[name](draw, table, *_place(draw, table))
    return tuple(map(tuple, table))


@st.composite
def edited_schedules(draw: st.DrawFn) -> Case:
    """A case after one to three edits."""
    case = draw(cases())
    rows = edited_rows(draw, case.schedule.rows, draw(NAMES))
    return Case(case.stages, replace(case.schedule, rows=rows))


@st.composite
def edited_programs(
    draw: st.DrawFn, make: Callable[[Case], Program], of: st.SearchStrategy[Case]
) -> tuple[Case, Program]:
    """What a case is lowered to, after one to three edits."""
    case = draw(of)
    program = make(case)
    names = draw(NAMES)
    return case, replace(program, rows=edited_rows(draw, program.rows, names))
