"""The schedule language: a recipe says what to run, in which order and within which limits.

    def zb_h1(s: Shape) -> Recipe:                       # a whole schedule
        rows = phases(s, warm_up=lambda rank: s.ranks - 1 - rank, repeat="FI")
        return Recipe(kinds="FIW", rows=rows, memory=lambda rank: s.ranks)

The order is one of, or `before` with any of:
    priority    sort key of an action; a rank takes the smallest that could run now (greedy)
    clock       sort key too, but the whole order it gives is kept as a promise: a forward runs early only
                if the limits then still let the rest follow, so limits can never block (see `engine`)
    rows        the exact order of each rank, perhaps made by `phases`; kinds in `fill` find their own place
Dependencies and transfers follow from the stage graph and are never written. Times decide when things are
ready, so the same recipe gives another order for uneven stages.

A family may return several recipes: the fastest for these costs that keeps to its limits is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...checks.schedules import check
from ...ir.errors import ScheduleError
from ...ir.operation import Operation as Operation, declare as declare
from ...ir.schedule import Schedule
from ..list_scheduler.choose_recipe import best
from .recipe import Recipe
from .shape import Shape


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
        rows=scheduled.outcome.rows,
        slices=scheduled.recipe.slices,
        pairs=scheduled.outcome.pairs,
    )
    check(schedule, shape.stages)
    return schedule


def timings(shape: Shape, recipe: Recipe) -> list[Recipe]:
    """A recipe as it is; for uneven times also where W may stick out of its gap, wholly or by half, then
    with actions that wait for more urgent ones."""
    if shape.even:
        return [recipe]
    return [recipe, replace(recipe, overlap=1.0), replace(recipe, overlap=0.5, patience=0.5)]


def options(shape: Shape, **defaults: float) -> Mapping[str, float]:
    """The options of a family with their defaults. Raises: ScheduleError if the user gave another one."""
    for name in shape.options:
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise ScheduleError(f"this schedule has no option {name!r}", hint=f"its options: {known}")
    return {**defaults, **shape.options}
