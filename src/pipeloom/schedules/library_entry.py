"""Entry: what the library knows of a schedule, and how its rows are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..ir.action import Action
from ..ir.errors import DeadlockError, ScheduleError
from ..ir.schedule import Pair, Schedule
from ..ir.stages import StageGraph
from ..ir.weights import FLUSH
from .language.recipe import Recipe
from .language.shape import Shape
from .list_scheduler.choose_recipe import fastest
from .placements import RankTable

Rows: TypeAlias = Iterable[Iterable[Action]]


class Family(Protocol):
    """Makes one row of compute actions per rank, from placement[stage] = rank."""

    def __call__(self, stages: StageGraph, placement: tuple[int, ...], microbatches: int, /) -> Rows: ...


PLACES = ("line", "loop", "wave", "both ways", "table")
MEANT = {
    "line": "one stage on each rank",
    "loop": "stages in a loop, stage s on rank s mod p",
    "wave": "stages there and back, as in a V",
    "both ways": "two replicas in opposite directions",
}
"""Place -> in words."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A schedule in the library.

    family: makes rows from the shape alone, or recipe: in the language, for any times.  rows: from a Shape,
        for what has operations of its own; a whole schedule where it has pairs or slices.
    place: where its stages go unless the user says otherwise: "line", "loop", "wave", "both ways", or
        "table".  table: number of ranks -> for each stage its rank, or the ranks that it spans.  stages: the
        graph of stages that a table is for, a chain unless given.
    copied: the recipe for rows into which copies are placed, if another one.  offload: of how many stages of
        each rank residuals are copied, unless the name says it.  held: (shape, that number) -> the most that
        a rank is to hold then, in residuals of one micro-batch on one stage.
    lacks: what a runtime must have to run it and has not, if anything.
    weights: the policy by which it updates them, see `ir.weights`.
    """

    family: Family | None = None
    recipe: Callable[[Shape], Recipe | Sequence[Recipe]] | None = None
    rows: Callable[[Shape], Rows | Schedule] | None = None
    place: str = "line"
    about: str = ""
    table: Callable[[int], RankTable] | None = None
    stages: StageGraph | None = None
    copied: Callable[[Shape], Recipe | Sequence[Recipe]] | None = None
    offload: Callable[[Shape], int] | None = None
    held: Callable[[Shape, int], float] | None = None
    lacks: str = ""
    weights: str = FLUSH

    def __post_init__(self) -> None:
        if (self.place == "table") != (self.table is not None) or self.place not in PLACES:
            raise ScheduleError(
                f"a schedule with place={self.place!r} and {'a' if self.table else 'no'} table",
                hint=f"the places are {', '.join(PLACES)}; give a table with place='table', and only then",
            )

    def make(self, shape: Shape, *, copied: bool = False) -> tuple[Rows, int, tuple[Pair, ...]]:
        """The rows, how many slices a micro-batch has, and the pairs.

        copied: copies will be placed into them.
        """
        if self.family is not None:
            return self.family(shape.stages, shape.placement, shape.microbatches), 1, ()
        if self.rows is not None:
            rows = self.rows(shape)
            return (rows.rows, rows.slices, rows.pairs) if isinstance(rows, Schedule) else (rows, 1, ())
        recipe = self.copied if copied and self.copied is not None else self.recipe
        assert recipe is not None
        scheduled = fastest(shape, recipe)
        return scheduled.outcome.rows, scheduled.recipe.slices, scheduled.outcome.pairs

    def refusal(self, shape: Shape, error: DeadlockError) -> ScheduleError:
        """Why a schedule of the library does not run where a shape has its stages."""
        ranks = ", ".join(map(str, shape.placement))
        within = "" if shape.limit_bytes is None else " within the limits"
        return ScheduleError(
            f"this schedule is for {MEANT.get(self.place, self.place)}; with stages on ranks {ranks}{within} "
            f"its order stops: {error.message}",
            hint="place the stages as it is meant, or use one for any placement: 1f1b, gpipe, or what "
            "`pipeloom schedule search` finds",
        )
