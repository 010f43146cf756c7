"""Chooses among recipes: runs them, gives up on one that cannot win, keeps the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from ...ir.action import B, F
from ...ir.errors import DeadlockError, ScheduleError
from ..language.recipe import Recipe
from ..language.shape import Shape
from .engine import run
from .insert_operations import insert_operations
from .posted_receives import step_with_posted_receives
from .problem import EPS, ScheduledRecipe
from .recipe_problem import make_problem
from .stretch import stretched

TRIED = 3
"""Recipes that are tried on all micro-batches, of those that are best on few."""

Family = Callable[[Shape], Recipe | Sequence[Recipe]]


def make(shape: Shape, recipe: Recipe) -> ScheduledRecipe:
    """Order everything as one recipe says.

    Raises: DeadlockError if its limits block; ScheduleError if it does not fit the shape.
    """
    scheduled = _make(shape, recipe, inf)
    assert scheduled is not None
    return scheduled


def _make(shape: Shape, recipe: Recipe, within_s: float) -> ScheduledRecipe | None:
    """The same, or None once it is certain that the step takes longer than `within_s`."""
    task, beside = make_problem(shape, recipe)
    outcome = run(task, within_s)
    if outcome is None:
        return None
    if beside:
        outcome = replace(outcome, rows=insert_operations(shape, outcome, beside))
    return ScheduledRecipe(recipe=recipe, outcome=outcome)


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
    if not isinstance(answer, Recipe | Sequence) or not all(isinstance(r, Recipe) for r in _several(answer)):
        raise ScheduleError(
            f"the schedule's function returned a {type(answer).__name__}", hint="return a Recipe, or several"
        )
    recipes = _several(answer)
    few = (2 if shape.chunks > 1 else 3) * shape.ranks
    if len(recipes) < 3 or shape.microbatches <= few:
        return best(shape, recipes)
    small = replace(shape, microbatches=few)
    try:
        ranked = _ranked(small, _several(family(small)), TRIED)
        return _lengthened(shape, small, [(scheduled, recipes[index]) for scheduled, index in ranked])
    except DeadlockError:  # more micro-batches may need more room
        return best(shape, recipes)


def _lengthened(
    shape: Shape, small: Shape, tries: Sequence[tuple[ScheduledRecipe, Recipe]]
) -> ScheduledRecipe:
    """The best of some recipes for all micro-batches, each with what it gives for few of them."""
    scheduled: list[ScheduledRecipe] = []
    left: list[Recipe] = []
    for few, recipe in tries:
        many = stretched(few, small, recipe, shape.microbatches)
        if many is None:
            left.append(recipe)
        else:
            scheduled.append(many)
    within_s = min((each.outcome.step_s for each in scheduled), default=inf) if _by_step(shape) else inf
    if left:
        scheduled += [each for each, _ in _ranked(shape, left, 1, within_s)]
    return _first(shape, scheduled, posted=True)


def _ranked(
    shape: Shape, recipes: Sequence[Recipe], most: int, limit_s: float = inf
) -> list[tuple[ScheduledRecipe, int]]:
    """The best few of some recipes, the best first, each with its place in the list.

    limit_s: longer steps than that are no use; then the list may be empty.
    Raises: what the last recipe raised, if none works.
    """
    scheduled: list[tuple[ScheduledRecipe, int]] = []
    problem: ScheduleError | None = None
    bound = lower_bound_s(shape), shape.microbatches * shape.period_s
    for index, recipe in enumerate(recipes):
        steps = sorted(one.outcome.step_s for one, _ in scheduled)
        enough = len(steps) >= most and _by_step(shape)
        within_s = steps[most - 1] * (1 + _slack(shape)) if enough else limit_s
        try:
            one = _make(shape, recipe, within_s)
        except DeadlockError as error:
            problem = error
            continue
        if one is not None:
            scheduled.append((one, index))
            if one.outcome.step_s <= bound[0] + EPS and one.outcome.span_s <= bound[1] + EPS:
                break
    if not scheduled and limit_s == inf:
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
    cost = {id(one): one.cost if _by_step(shape) else one.cost[::-1] for one in scheduled}
    close = list(scheduled)
    if posted and len(scheduled) > 1:
        close, least = [], inf
        for one in sorted(scheduled, key=lambda one: cost[id(one)]):
            if cost[id(one)][0] > least * (1 + _slack(shape)) + EPS:
                break
            task, _ = make_problem(shape, one.recipe)
            seconds = step_with_posted_receives(task, one.outcome)
            if seconds is not None:
                step_s, span_s = (round(each, 9) for each in seconds)
                cost[id(one)] = (step_s, span_s) if _by_step(shape) else (span_s, step_s)
            close.append(one)
            least = min(least, cost[id(one)][0])
    least = min(cost[id(one)][0] for one in close) * (1 + _slack(shape)) + EPS
    return min((one for one in close if cost[id(one)][0] <= least), key=lambda one: cost[id(one)][::-1])


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
