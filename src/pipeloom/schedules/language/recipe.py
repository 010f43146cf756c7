"""The schedule language: a recipe says what to run, in which order and within which limits.

    def zb_h1(s: Shape) -> Recipe:                       # a whole schedule
        rows = phases(s, warm_up=lambda rank: s.ranks - 1 - rank, repeat="FI")
        return Recipe(kinds="FIW", rows=rows, memory=lambda rank: s.ranks)

The order is one of, or `before` with any of:
    priority    sort key of an action; a rank takes the smallest that could run now (greedy)
    clock       sort key too, but the whole order it gives is kept as a promise: a forward runs early only
                if the limits then still let the rest follow, so limits block only an order that passes them
    rows        the exact order of each rank, perhaps made by `phases`; kinds in `fill` find their own place
Dependencies and transfers follow from the stage graph and are never written. Times decide when things are
ready, so the same recipe gives another order for uneven stages.

A family may return several recipes: the fastest for these costs that keeps to its limits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from math import isnan
from numbers import Real
from typing import Any, TypeAlias

from ...ir.action import KINDS, Action, Kind
from ...ir.errors import ScheduleError
from ...ir.operation import OPERATIONS, Operation
from .shape import Shape, path_clock

PerRank: TypeAlias = Callable[[int], float]
RowMaker: TypeAlias = Callable[[int], Iterable[Action]]

EARLY = ("all", "warm", "none")


def per_rank(limit: PerRank | float, rank: int) -> float:
    most = limit(rank) if callable(limit) else limit
    if not is_number(most):
        raise ScheduleError(
            f"a recipe limits what a rank or a stage holds to {most!r}",
            hint="give a number, or a function of the rank (of the stage: in_flight_stage) that returns one",
        )
    return float(most)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isnan(value)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to order everything.

    kinds: "FB" or "FIW", for all stages or as a function of the stage; "F" for evaluation. "FBIW", with rows:
        B where they have one, else I and W.
    priority, clock, rows: the order, see the module.  before(a, b): `a` goes first where both are next.
    memory: most residuals of a rank, in micro-batches: a stage of a rank with v stages counts 1/v, from F
        until B or W.  in_flight: most micro-batches of a rank, counted per stage, between F and B or I.
    in_flight_stage: the same of one stage.  memory_bytes: most bytes of residuals of a rank; the costs must
        then say what residuals take.
    fill: kinds that run only where nothing else can, so that they fill gaps: "W", or ("W", "COMPRESS").
    drain: kinds that keep to the order until the last forward of their rank has begun, and then fill gaps.
    early: which forwards may run before their turn in a clock: "all", "warm" (only until the rank's first
        backward) or "none".
    patience: share of its own time for which an action waits for a more urgent one that is on its way.
    overlap: share of a filler that may stick out of the gap it fills; or two numbers: until the last forward
        of the rank has begun, and from then on.
    level: a filler also sticks out where the gap would leave its rank idle for longer than any other so far.
    together(a, b): b may run with a as one unit, as F of one micro-batch with B of another. With rows:
        neighbours for which it holds do so; else where both could run now.
    insert: operations that a user declared. Each goes next to its anchor, unless `rows` has it somewhere, or
        `fill` names it: then it runs where nothing else can.
    slices: sequence slices of each micro-batch; forwards ascend, backwards
        descend in each micro-batch, and every slice is an action of its own.
    """

    kinds: str | Callable[[int], str] = "FB"
    priority: Callable[[Action], object] | None = None
    clock: Callable[[int, Kind, int], float] | None = None
    rows: Sequence[Sequence[Action]] | RowMaker | None = None
    before: Callable[[Action, Action], bool] | None = None
    memory: PerRank | float | None = None
    in_flight: PerRank | float | None = None
    in_flight_stage: PerRank | float | None = None
    memory_bytes: PerRank | float | None = None
    fill: Sequence[str] = "W"
    drain: Sequence[str] = ""
    early: str = "all"
    patience: float = 0.0
    overlap: float | tuple[float, float] = 0.0
    level: bool = False
    together: Callable[[Action, Action], bool] | None = None
    insert: tuple[Operation, ...] = ()
    slices: int = 1

    def __post_init__(self) -> None:
        orders = [name for name in ("priority", "clock", "rows") if getattr(self, name) is not None]
        if len(orders) != 1:
            raise ScheduleError(
                f"a recipe with {' and '.join(orders) or 'no order'}",
                hint="give exactly one of priority=, clock= and rows=; before= may go with any",
            )
        for name in ("priority", "clock", "before", "together"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise ScheduleError(f"a recipe with {name}={given!r}", hint="give a function")
        if self.memory is not None and self.memory_bytes is not None:
            raise ScheduleError(
                "a recipe with memory and memory_bytes", hint="limit either micro-batches or bytes"
            )
        if self.early not in EARLY:
            raise ScheduleError(f"a recipe with early={self.early!r}", hint=f"use one of {', '.join(EARLY)}")
        for operation in self.insert:
            if operation.kind not in OPERATIONS:
                raise ScheduleError(
                    f"operation {operation.letters} is not declared",
                    hint="write declare(Operation(...)) where your file begins",
                )

    def kinds_of(self, stage: int) -> tuple[Kind, ...]:
        text = self.kinds if isinstance(self.kinds, str) else self.kinds(stage)
        if text not in ("F", "FB", "FIW", "FBIW") or (text == "FBIW" and self.rows is None):
            raise ScheduleError(
                f"stage {stage} has the kinds {text!r}",
                hint="use F, FB, FIW or, with rows=, FBIW; further kinds go with insert=",
            )
        return tuple(map(Kind, text))


_ARGUMENTS = {
    **dict.fromkeys(
        ("kinds", "rows", "memory", "in_flight", "in_flight_stage", "memory_bytes", "priority"), 1
    ),
    **{"clock": 3, "before": 2, "together": 2},
}
"""How many arguments a recipe's functions get."""


def refuse_slips(recipe: Recipe) -> None:
    """What a hand writes wrongly, before it fails far away or does nothing. Raises: ScheduleError."""
    for name, count in _ARGUMENTS.items():
        if callable(given := getattr(recipe, name)):
            try:
                with suppress(ValueError):  # of some builtin functions nothing is known
                    signature(given).bind(*range(count))
            except TypeError as error:
                raise ScheduleError(
                    f"{name}= of a recipe: {error}",
                    hint=f"it is called with {count} argument{'s' * (count > 1)}: see `Recipe`",
                ) from None
    ends = recipe.overlap if isinstance(recipe.overlap, tuple) else (recipe.overlap,) * 2
    right = {
        "kinds": isinstance(recipe.kinds, str) or callable(recipe.kinds),
        "rows": recipe.rows is None or callable(recipe.rows) or isinstance(recipe.rows, Sequence),
        "patience": is_number(recipe.patience) and recipe.patience >= 0,
        "overlap": len(ends) == 2 and all(is_number(share) and share >= 0 for share in ends),
        "level": isinstance(recipe.level, bool),
        "slices": isinstance(recipe.slices, int) and not isinstance(recipe.slices, bool),
        **{name: _names_kinds(getattr(recipe, name)) for name in ("fill", "drain")},
    }
    if wrong := [name for name, good in right.items() if not good]:
        raise ScheduleError(
            f"a recipe with {wrong[0]}={getattr(recipe, wrong[0])!r}", hint=f"see `{wrong[0]}` of `Recipe`"
        )


def _names_kinds(given: object) -> bool:
    return isinstance(given, Sequence) and all(one in KINDS for one in given)


def slips_refused(family: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of a `Shape`, whose recipes are looked at."""

    @wraps(family)
    def looked_at(*args: Any, **options: Any) -> Any:
        answer = family(*args, **options)
        for one in answer if isinstance(answer, Sequence) else (answer,):
            if isinstance(one, Recipe):
                refuse_slips(one)
        return answer

    return looked_at


def steady_paces(
    shape: Shape, kinds: str, memory: float, early: Sequence[str] = ("all", "warm")
) -> Iterator[Recipe]:
    """Micro-batches at a steady pace, for shapes of which no pattern says anything."""
    for real in (False,) if shape.even else (False, True):
        for pace in (2.0, 1.5, 1.0):
            clock = path_clock(shape, (pace,), (pace,), real=real, kinds=kinds)
            for one in early:
                yield Recipe(kinds=kinds, clock=clock, memory=memory, early=one)


def timings(shape: Shape, recipe: Recipe) -> list[Recipe]:
    """A recipe as it is; for uneven times also where W may stick out of its gap, wholly or by half, then
    with actions that wait for more urgent ones."""
    if shape.even:
        return [recipe]
    return [recipe, replace(recipe, overlap=1.0), replace(recipe, overlap=0.5, patience=0.5)]
