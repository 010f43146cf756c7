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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..ir.action import Action, F, Kind, W
from ..ir.check import check
from ..ir.errors import ScheduleError
from ..ir.operation import Operation
from ..ir.schedule import Schedule
from .choose import best, fastest, make
from .recipe import Recipe
from .shape import Shape, path_clock

__all__ = [
    "Operation", "Recipe", "Shape", "best", "fastest", "make", "order", "path_clock", "phases", "timings",
    "turns",
]  # fmt: skip


def order(shape: Shape, recipes: Recipe | Sequence[Recipe], *, name: str = "mine") -> Schedule:
    """The schedule that a recipe gives, or the fastest of several, checked.

    Raises: DeadlockError if its limits block; ScheduleError if it breaks a rule.

    >>> from pipeloom.ir.action import B
    >>> from pipeloom.schedules import shape_of
    >>> print(order(shape_of(1, microbatches=2), Recipe(priority=lambda a: (a.kind == B, a.microbatch))))
    0F0 0F1 0B0 0B1
    """
    made = best(shape, recipes)
    schedule = Schedule(
        name=name, microbatches=shape.microbatches, placement=shape.placement, rows=made.outcome.rows,
        slices=made.recipe.slices, pairs=made.outcome.pairs,
    )  # fmt: skip
    check(schedule, shape.stages)
    return schedule


def phases(
    shape: Shape, *, warm_up: Callable[[int], int], repeat: str, kinds: str = "FIW",
    forward: Callable[[int], Sequence[Action]] | None = None,
    backward: Callable[[int], Sequence[Action]] | None = None,
) -> tuple[tuple[Action, ...], ...]:  # fmt: skip
    """Rows by phases: some forwards, then a pattern until they are used up, then the rest.

    warm_up: rank -> forwards before the pattern begins.  repeat: such as "FB", "FIW" or "FI".
    forward, backward: rank -> its actions in the order of the phases; one micro-batch after the other,
        the stages of the rank in their order, unless given. W follows the order of I.

    >>> from pipeloom.schedules import shape_of
    >>> for row in phases(shape_of(2, microbatches=2), warm_up=lambda r: 1 - r, repeat="FB", kinds="FB"):
    ...     print(*row)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    last = Kind(kinds[1])
    rows: list[tuple[Action, ...]] = []
    for rank in range(shape.ranks):
        forwards = list(forward(rank) if forward else turns(shape, rank, F))
        backwards = list(backward(rank) if backward else turns(shape, rank, last))
        queues: dict[str, Iterator[Action]] = {
            "F": iter(forwards), str(last): iter(backwards),
            "W": iter([Action(a.stage, W, a.microbatch) for a in backwards]),
        }  # fmt: skip
        row = [next(queues["F"]) for _ in range(min(warm_up(rank), len(forwards)))]
        for _ in range(len(forwards) - len(row)):
            row += [next(queues[letter]) for letter in repeat]
        drain = repeat.replace("F", "")
        for action in queues[str(last)]:
            row.append(action)
            if "W" in drain:
                row.append(next(queues["W"]))
        rows.append(tuple(row))
    return tuple(rows)


def turns(shape: Shape, rank: int, kind: Kind, group: int | None = None) -> list[Action]:
    """Actions of a rank, `group` micro-batches at a time per stage: forwards from its first stage on,
    backwards from its last."""
    size = group or shape.microbatches
    own = shape.own[rank] if kind == F else tuple(reversed(shape.own[rank]))
    found = []
    for low in range(0, shape.microbatches, size):
        high = min(low + size, shape.microbatches)
        found += [Action(stage, kind, b) for stage in own for b in range(low, high)]
    return found


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
