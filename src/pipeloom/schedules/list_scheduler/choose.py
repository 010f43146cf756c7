"""Chooses among recipes: runs them, gives up on one that cannot win, keeps the fastest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from ...checks.schedules import check
from ...ir.action import Action, B, F
from ...ir.columns import Columns, Floats, Rows, columns_of
from ...ir.errors import DeadlockError, ScheduleError, of_type
from ...ir.operation import Operation
from ...ir.schedule import Program, Schedule
from ...lowering.transfers import add_transfers
from ...simulator.simulate import time_actions
from ..language.recipe import Recipe
from ..language.shape import Shape
from .engine import ScheduledRecipe, run
from .tables import EPS, RecipeTables, tables_of


def row_times(columns: Columns, shape: Shape) -> tuple[Floats, Floats]:
    """When each entry of rows that can run begins and ends, in seconds. A rank has two receives posted for
    each rank that sends to it: a message sent further ahead waits until an earlier one is taken."""
    program = Program(microbatches=shape.microbatches, placement=shape.placement, rows=Rows(columns))
    program = add_transfers(program, shape.stages)
    stages = range(len(shape.placement))
    seconds = np.zeros((len(stages), len(columns.kinds)))
    for code in np.unique(columns.kind).tolist():
        seconds[:, code] = [shape.seconds(s, columns.kinds[code]) for s in stages]
    shared = shape.uplinks is not None and shape.uplinks.hold_up(shape.costs)
    begin, end = time_actions(
        program,
        shape.stages,
        seconds,
        shape.delay_s,
        uplinks=shape.uplinks.of_rank if shape.uplinks is not None and shared else (),
        copy_link_s=shape.uplinks.seconds if shape.uplinks is not None and shared else (),
    )
    own = ~program.columns.is_transfer
    return begin[own], end[own]


TRIED = 3

Family = Callable[[Shape], Recipe | Sequence[Recipe]]


def make(shape: Shape, recipe: Recipe) -> ScheduledRecipe:
    """Order everything as one recipe says.

    Raises: DeadlockError if its limits block; ScheduleError if it does not fit the shape.
    """
    scheduled = _make(shape, tables_of(shape, recipe), inf)
    assert scheduled is not None
    return scheduled


def _make(shape: Shape, problem: RecipeTables, within_s: float) -> ScheduledRecipe | None:
    scheduled = run(problem, within_s)
    if scheduled is None or not problem.beside:
        return scheduled
    return replace(scheduled, rows=insert_operations(shape, scheduled, problem.beside))


def best(shape: Shape, recipes: Recipe | Sequence[Recipe]) -> ScheduledRecipe:
    """The fastest of some recipes: the shortest step, then the shortest span of a rank. With uneven times a
    step may be 0.1 % longer than the shortest for a shorter span. Where the shape asks for the shortest span,
    the other way round.

    Raises: what the last recipe raised, if none works.
    """
    return _ranked(shape, _several(recipes), 1)[0][0]


def fastest(shape: Shape, family: Family) -> ScheduledRecipe:
    """The fastest recipe of a family. With many micro-batches the three that are best on twice as many as
    ranks are tried: what recipes differ in is mostly how they begin and end. (Three times as many where a
    rank has one stage, as such schedules may hold twice as many as ranks.)

    Raises: what the last recipe raised, if none works.
    """
    answer = family(shape)
    recipes = _several(answer) if isinstance(answer, Recipe | Sequence) else []
    if not recipes or not all(isinstance(recipe, Recipe) for recipe in recipes):
        raise ScheduleError(
            f"the schedule's function returned {of_type(answer)}", hint="return a Recipe, or several"
        )
    few = (2 if shape.chunks > 1 else 3) * shape.ranks
    if len(recipes) < 3 or shape.microbatches <= few:
        return best(shape, recipes)
    small = replace(shape, microbatches=few)
    try:
        tried = _several(family(small))
        if len(tried) != len(recipes):  # what is tried depends on how many micro-batches there are
            return best(shape, recipes)
        return best(shape, [recipes[at] for _, at in _ranked(small, tried, TRIED)])
    except DeadlockError:  # more micro-batches may need more room
        return best(shape, recipes)


def _ranked(shape: Shape, recipes: Sequence[Recipe], most: int) -> list[tuple[ScheduledRecipe, int]]:
    """The best few of some recipes, the best first, each with its place in the list. Raises: what the last
    recipe raised, if none works."""
    scheduled: list[tuple[ScheduledRecipe, int]] = []
    problem: ScheduleError | None = None
    tables: RecipeTables | None = None
    bound = lower_bound_s(shape), shape.microbatches * shape.period_s
    for index, recipe in enumerate(recipes):
        steps = sorted(one.step_s for one, _ in scheduled)
        enough = len(steps) >= most and _by_step(shape)
        within_s = steps[most - 1] * (1 + _slack(shape)) if enough else inf
        try:
            tables = tables_of(shape, recipe, like=tables)
            one = _make(shape, tables, within_s)
        except DeadlockError as error:
            problem = error
            continue
        if one is not None:
            scheduled.append((one, index))
            if one.step_s <= bound[0] + EPS and one.span_s <= bound[1] + EPS:
                break
    if not scheduled:
        assert problem is not None
        raise problem
    places = {id(one): index for one, index in scheduled}
    ranked: list[tuple[ScheduledRecipe, int]] = []
    while places and len(ranked) < most:
        left = [one for one, _ in scheduled if id(one) in places]
        first = _first(shape, left, posted=most == 1)
        ranked.append((first, places.pop(id(first))))
    return ranked


def _first(shape: Shape, scheduled: Sequence[ScheduledRecipe], *, posted: bool) -> ScheduledRecipe:
    """The best: of the shortest steps the one with the shortest span of a rank, or the other way round.

    posted: by the times with few receives posted. As these are never shorter, only those are timed so that
    are shorter than the best so far without.
    """
    costs = ((one, (round(one.step_s, 9), round(one.span_s, 9))) for one in scheduled)
    cost = {id(one): seconds if _by_step(shape) else seconds[::-1] for one, seconds in costs}
    close = list(scheduled)
    if posted and len(scheduled) > 1:
        close, least = [], inf
        timed: list[tuple[Sequence[Sequence[Action]], tuple[float, float]]] = []
        for one in sorted(scheduled, key=lambda one: cost[id(one)]):
            if cost[id(one)][0] > least * (1 + _slack(shape)) + EPS:
                break
            same = (known for rows, known in timed if rows == one.rows)  # with few ranks most recipes agree
            if seconds := next(same, None) or simulated_cost(shape, one):
                timed.append((one.rows, seconds))
                cost[id(one)] = seconds if _by_step(shape) else seconds[::-1]
            close.append(one)
            least = min(least, cost[id(one)][0])
    least = min(cost[id(one)][0] for one in close) * (1 + _slack(shape)) + EPS
    return min((one for one in close if cost[id(one)][0] <= least), key=lambda one: cost[id(one)][::-1])


def simulated_cost(shape: Shape, scheduled: ScheduledRecipe) -> tuple[float, float] | None:
    """The cost of a scheduled recipe by the simulator: the list scheduler hands a message over as soon as its
    link is free, however far ahead of its user, but ranks have few receives posted.

        rank 0   |0F0|0F1|0F2|0F3|              0F2's message may move only when that of 0F0 has been taken,
        rank 1         busy        |1F0|1F1|    with two receives posted ahead

    None where both say the same, as no message takes time, or where rows have pairs, stages on several ranks,
    or operations next to their anchors.
    """
    beside = {operation.kind for operation in scheduled.recipe.insert} - set(scheduled.recipe.fill)
    late = any(shape.delay_s(a, b) > 0 for a, b in shape.stages.between)
    if not late or scheduled.pairs or shape.flow.shards or beside:
        return None
    columns = columns_of(scheduled.rows)
    begin, end = row_times(columns, shape)
    rows = [slice(low, high) for low, high in pairwise(columns.offsets.tolist()) if low < high]
    span_s = max(float(end[row][-1] - begin[row][0]) for row in rows)
    return round(float(end.max()), 9), round(span_s, 9)


def _by_step(shape: Shape) -> bool:
    return shape.shortest == "step"


def _slack(shape: Shape) -> float:
    """Share by which a step may be longer than the shortest if its span is shorter: none in the textbook
    case; else less than what a rank's times vary by."""
    return 0.0 if shape.even else 1e-3


def _several(recipes: Recipe | Sequence[Recipe]) -> list[Recipe]:
    return [recipes] if isinstance(recipes, Recipe) else list(recipes)


def lower_bound_s(shape: Shape) -> float:
    """No order is faster: each rank begins when its first data can be there, and then is never idle."""
    start: dict[int, float] = {}
    for s in shape.flow.order:
        start[s] = max(
            (start[r] + shape.seconds(r, F) + shape.delay_s(r, s) for r in shape.flow.reads_from[s]),
            default=0.0,
        )
    busy = [sum(shape.seconds(s, F) + shape.seconds(s, B) for s in stages) for stages in shape.rank_stages]
    return max(
        min(start[s] for s in stages) + shape.microbatches * busy[r]
        for r, stages in enumerate(shape.rank_stages)
    )


def as_published(s: Shape, family: Callable[[Shape], Sequence[Recipe]]) -> list[Recipe]:
    """The order that a family gives for equal times, with W in its place and with W where it fits; nothing
    where the times are equal. It holds as much: what a rank holds follows from the order of its row.

    With some times it is shorter than what is ordered by these times: a greedy order takes the next action as
    soon as it can, and pays for it later.
    """
    if s.even:
        return []
    equal: Any = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "backward_s": 2.0}
    one = tuple(replace(cost, **equal) for cost in s.costs)
    made = fastest(replace(s, costs=one, transfer_s=0.0), family)
    plain: Any = {"clock": None, "priority": None, "early": "all", "patience": 0.0, "overlap": 0.0}
    fixed = replace(made.recipe, rows=made.rows, fill="", drain="", **plain)
    return [fixed, replace(fixed, fill="W"), replace(fixed, fill="W", overlap=1.0)]


def order(shape: Shape, recipes: Recipe | Sequence[Recipe], *, name: str = "mine") -> Schedule:
    """The schedule that a recipe gives, or the fastest of several, checked.

    Raises: DeadlockError if its limits block; ScheduleError if it breaks a rule.

    >>> from pipeloom.ir.action import B
    >>> from pipeloom.schedules.registry import shape_of
    >>> print(order(shape_of(1, microbatches=2), Recipe(priority=lambda a: (a.kind == B, a.microbatch))))
    0F0 0F1 0B0 0B1
    """
    scheduled = best(shape, recipes)
    schedule = Schedule(
        name=name,
        microbatches=shape.microbatches,
        placement=shape.placement,
        rows=scheduled.rows,
        slices=scheduled.recipe.slices,
        pairs=scheduled.pairs,
    )
    check(schedule, shape.stages)
    return schedule


def insert_operations(
    shape: Shape, scheduled: ScheduledRecipe, operations: Sequence[Operation]
) -> tuple[tuple[Action, ...], ...]:
    """The rows with each operation right after or before its anchor, or `ahead` anchors earlier.

    A pair stays together: what belongs between its two actions goes in front of it or behind it.
    """
    second = dict(scheduled.pairs)
    return tuple(_row(shape, rank, row, operations, second) for rank, row in enumerate(scheduled.rows))


def _row(
    shape: Shape,
    rank: int,
    row: Sequence[Action],
    operations: Sequence[Operation],
    second: dict[Action, Action],
) -> tuple[Action, ...]:
    front: dict[Action, list[Action]] = defaultdict(list)
    behind: dict[Action, list[Action]] = defaultdict(list)
    for operation in operations:
        for stage in shape.rank_stages[rank]:
            anchors = [a for a in row if a.stage == stage and operation.stands_at(a.kind)]
            for at, anchor in enumerate(anchors):
                if not operation.runs(stage, rank, anchor.microbatch):
                    continue
                action = Action(stage, operation.kind, anchor.microbatch)
                if operation.after is not None:
                    behind[anchor].append(action)
                else:
                    front[anchors[max(0, at - operation.ahead)]].append(action)
    actions: list[Action] = []
    late: list[Action] = []
    partner = None
    for action in row:
        if action == partner:
            actions += [action, *late, *behind[action]]
            late, partner = [], None
            continue
        actions += front[action]
        partner = second.get(action)
        if partner is None:
            actions += [action, *behind[action]]
        else:
            actions += [*front[partner], action]
            late = behind[action]
    return tuple(actions)
