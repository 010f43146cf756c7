"""Recipe and shape -> what the list scheduler is asked to order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from ...ir.action import Action, B, F, I, Kind, W
from ...ir.columns import B_, Columns, Rows, columns_of
from ...ir.costs import pair_seconds
from ...ir.dependencies import needs, produces
from ...ir.errors import ScheduleError
from ...ir.operation import OPERATIONS, Operation
from ..language.recipe import Recipe, per_rank
from ..language.shape import Shape
from .problem import SchedulingProblem, Stream


def make_problem(shape: Shape, recipe: Recipe) -> tuple[SchedulingProblem, tuple[Operation, ...]]:
    """The task, and the operations that are to be put next to their anchors afterwards."""
    listed = _listed(shape, recipe)
    named = set(recipe.fill) | (set() if listed is None else _kinds_in(listed.columns))
    loose = tuple(o for o in recipe.insert if o.kind in named)
    for operation in loose:
        if operation.before is not None and operation.kind in recipe.fill:
            raise ScheduleError(
                f"{operation.kind} runs before {operation.before}, so it cannot fill gaps",
                hint="leave it out of fill=, or declare it with after=",
            )
    beside = tuple(o for o in recipe.insert if o not in loose)
    memory, limits = _memory(shape, recipe, beside)
    streams = [replace(s, memory=memory(s)) for s in _streams(shape, recipe, loose, _whole(recipe, listed))]
    fillers = {s.kind for s in streams if s.filler}
    rows = None if listed is None else _without(listed, fillers)
    stages = range(len(shape.placement))
    task = SchedulingProblem(
        streams=tuple(_with_neighbours(shape, s, beside) for s in streams),
        ranks=shape.ranks,
        key=recipe.priority,
        clock=recipe.clock,
        depth=_depth(shape),
        row_of=rows,
        memory=limits,
        open_rank=tuple(map(recipe.in_flight, range(shape.ranks))) if recipe.in_flight else (),
        open_stage=tuple(map(recipe.in_flight_stage, stages)) if recipe.in_flight_stage else (),
        before=recipe.before,
        patience=recipe.patience,
        early=recipe.early,
        level=recipe.level,
        overlap=recipe.overlap if isinstance(recipe.overlap, tuple) else (recipe.overlap, recipe.overlap),
        together=recipe.together,
        paired=_pairs(shape, recipe, rows or ()),
        joint=lambda a, b: pair_seconds(shape.costs, (a, b)),
    )
    return task, beside


def _listed(shape: Shape, recipe: Recipe) -> Rows[Action] | None:
    rows = recipe.rows
    if rows is None:
        return None
    listed = [rows(r) for r in range(shape.ranks)] if callable(rows) else rows
    if len(listed) != shape.ranks:
        raise ScheduleError(f"{len(listed)} rows for {shape.ranks} ranks", hint="give one row per rank")
    return listed if isinstance(listed, Rows) else Rows(columns_of(listed))


def _kinds_in(columns: Columns) -> set[Kind]:
    return {columns.kinds[code] for code in np.unique(columns.kind).tolist()}


def _without(rows: Rows[Action], kinds: set[Kind]) -> Rows[Action]:
    """The rows without what is to find its own place."""
    columns = rows.columns
    codes = [code for code, kind in enumerate(columns.kinds) if kind in kinds]
    dropped = np.isin(columns.kind, codes)
    return Rows(columns.where(~dropped)) if dropped.any() else rows


def _depth(shape: Shape) -> tuple[int, ...]:
    place = {s: i for i, s in enumerate(shape.flow.order)}
    # The same for all ranks of a stage, so that these have their units in one order.
    return tuple(place[min(s, *shape.flow.shards.get(s, (s,)))] for s in range(len(shape.placement)))


def _pairs(shape: Shape, recipe: Recipe, rows: Sequence[Sequence[Action]]) -> dict[Action, Action]:
    """Neighbours in fixed rows that are to run as one unit; not those of which one needs the other."""
    second_of: dict[Action, Action] = {}
    for row in rows if recipe.together is not None else ():
        taken = False
        for a, b in zip(row, row[1:], strict=False):
            assert recipe.together is not None
            alone = a.stage not in shape.flow.shards and b.stage not in shape.flow.shards
            taken = not taken and alone and recipe.together(a, b)
            taken = taken and set(produces(a)).isdisjoint(needs(b, shape.flow))
            if taken:
                second_of[a] = b
    return second_of


def _with_neighbours(shape: Shape, s: Stream, beside: Sequence[Operation]) -> Stream:
    """A stream with the time of the operations that go next to its actions."""
    near = [o for o in beside if o.stands_at(s.kind)]
    # What runs beside computing costs the rank nothing, unless the anchor must wait for it.
    front = [o for o in near if o.before is not None and (o.stream == "compute" or not o.ahead)]
    behind = [o for o in near if o.after is not None and o.stream == "compute"]
    if not front and not behind:
        return s

    def seconds(operations: Sequence[Operation], b: int) -> float:
        return sum(shape.seconds(s.stage, o.kind) for o in operations if o.runs(s.stage, s.rank, b))

    return replace(s, around=lambda b: (seconds(front, b), seconds(behind, b)))


def _memory(
    shape: Shape, recipe: Recipe, beside: Sequence[Operation]
) -> tuple[Callable[[Stream], float], tuple[float, ...]]:
    """What each stream adds or gives back, and each rank's limit: in bytes where bytes are limited.

    Operations count where bytes do: by what they leave, if they run at every micro-batch; and the most that
    one of them needs for itself is kept free.
    """
    ranks = range(shape.ranks)
    in_bytes = recipe.memory_bytes is not None or shape.limit_bytes is not None

    def change(s: Stream) -> float:
        cost, operation = shape.costs[s.stage], OPERATIONS.get(s.kind)
        if not in_bytes:
            share = 1.0 / len(shape.rank_stages[s.rank])
            return {F: share, B: -share, W: -share}.get(s.kind, 0.0)
        if operation is not None:
            return float(operation.acquired(s.stage) - operation.released(s.stage))
        held, carried = float(cost.residual_bytes), float(cost.carried_bytes)
        near = [o for o in beside if o.every == 1 and o.stands_at(s.kind)]
        left = sum(o.acquired(s.stage) - o.released(s.stage) for o in near if o.runs(s.stage, s.rank, 0))
        return {F: held, B: -held, I: carried - held, W: -carried}[s.kind] + left

    def free(rank: int) -> int:
        """Bytes that operations hold only while they run."""
        both = [(o, s) for o in recipe.insert for s in shape.rank_stages[rank]]
        return max((min(o.acquired(s), o.released(s)) for o, s in both), default=0)

    if in_bytes:
        limits = list(shape.limits_bytes)
        if recipe.memory_bytes is not None:
            limits = [min(limit, per_rank(recipe.memory_bytes, r)) for r, limit in enumerate(limits)]
        return change, tuple(limit - free(rank) for rank, limit in enumerate(limits))
    most = inf if recipe.memory is None else recipe.memory
    return change, tuple(per_rank(most, rank) for rank in ranks)


def _whole(recipe: Recipe, listed: Rows[Action] | None) -> frozenset[tuple[int, int]]:
    """Stages and micro-batches whose backward the rows run as one B, where a stage may do either."""
    if listed is None or recipe.kinds in ("F", "FB", "FIW"):
        return frozenset()
    columns = listed.columns
    at = columns.kind == B_
    return frozenset(zip(columns.stage[at].tolist(), columns.microbatch[at].tolist(), strict=True))


def _streams(
    shape: Shape, recipe: Recipe, loose: Sequence[Operation], whole: frozenset[tuple[int, int]]
) -> list[Stream]:
    flow, fill = shape.flow, set(recipe.fill)
    kinds = [
        (*recipe.kinds_of(s), *(o.kind for o in loose if any(_runs_at(shape, o, s))))
        for s in range(len(shape.placement))
    ]
    index: dict[tuple[int, Kind], int] = {}
    for s, own in enumerate(kinds):
        for kind in own:
            index[s, kind] = len(index)
    back = [tuple(k for k in own if k in (B, I)) for own in kinds]
    feeds: dict[tuple[int, Kind], list[tuple[int, float]]] = {key: [] for key in index}
    needed = dict.fromkeys(index, 0)

    def edge(source: int, ways: Sequence[Kind], target: tuple[int, Kind]) -> None:
        """The target waits for one of the ways in which the source runs a micro-batch."""
        for kind in ways:
            feeds[source, kind].append((index[target], shape.delay_s(source, target[0])))
        needed[target] += 1

    for s, own in enumerate(kinds):
        for reader in flow.read_by[s]:
            edge(s, (F,), (reader, F))
        for mine in back[s]:
            edge(s, (F,), (s, mine))
            for reader in flow.gradients_from[s]:
                edge(reader, back[reader], (s, mine))
        if W in own:
            edge(s, (I,), (s, W))
        for operation in loose:
            if operation.kind in own and operation.after is not None:
                edge(s, [k for k in own if operation.stands_at(k)], (s, operation.kind))
    return [
        Stream(
            stage=s,
            kind=kind,
            rank=shape.placement[s],
            memory=0.0,
            seconds=shape.seconds(s, kind) if _occupies(kind) else 0.0,
            feeds=tuple(feeds[s, kind]),
            needs=needed[s, kind],
            order=_order(shape, recipe, s, kind, whole),
            filler=kind in fill,
            drains=kind in recipe.drain,
            opens=kind == F,
            closes=kind in (B, I),
            unit=tuple(index[o, kind] for o in flow.shards.get(s, ()) if kind in (F, B, I)),
        )
        for s, kind in index
    ]


def _occupies(kind: Kind) -> bool:
    return kind not in OPERATIONS or OPERATIONS[kind].stream == "compute"


def _runs_at(shape: Shape, operation: Operation, stage: int) -> list[int]:
    return [b for b in range(shape.microbatches) if operation.runs(stage, shape.placement[stage], b)]


def _order(
    shape: Shape, recipe: Recipe, stage: int, kind: Kind, whole: frozenset[tuple[int, int]]
) -> Sequence[int]:
    """Micro-batches in the order in which a stream runs them; slices go back where they came from."""
    k = recipe.slices
    order: Sequence[int] = range(shape.microbatches)
    if k > 1 and kind != F:
        order = [low + k - 1 - i for low in range(0, shape.microbatches, k) for i in range(k)]
    if kind in OPERATIONS:
        wanted = set(_runs_at(shape, OPERATIONS[kind], stage))
        order = [b for b in order if b in wanted]
    elif kind in (B, I, W) and B in recipe.kinds_of(stage) and I in recipe.kinds_of(stage):
        order = [b for b in order if ((stage, b) in whole) == (kind == B)]
    return order
