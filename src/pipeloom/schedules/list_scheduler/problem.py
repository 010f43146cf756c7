"""What the list scheduler is given and what it returns: streams of actions, a task, an outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...ir.action import Action, Kind
from ...ir.columns import Rows
from ...ir.schedule import Pair
from ..language.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class ScheduledRecipe:
    """What a recipe gives for a shape: the rows, and when the list scheduler expects what."""

    recipe: Recipe
    outcome: Outcome = field(repr=False)

    @property
    def cost(self) -> tuple[float, float]:
        """Smaller is better: the step, then the longest span of a rank."""
        return round(self.outcome.step_s, 9), round(self.outcome.span_s, 9)


EPS = 1e-9
"""Times and sizes this close (relative to 1 s, 1 unit) are equal."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """All actions of one kind on one stage.

    feeds: (stream index, seconds until it sees the result) of every stream that uses a result.
    needs: how many results each action of this stream waits for.
    memory: change when an action starts, if above 0, or ends, if below: residuals come with F and go
        with B or W.
    filler: runs only where nothing else can; drains: the same once all forwards of the rank have begun.
    opens, closes: F opens a micro-batch, B or I closes it.
    around: micro-batch -> seconds of what a user inserted right before and right after the action.
    unit: streams on other ranks that begin together with this one, as those of a stage on several ranks do.
    """

    stage: int
    kind: Kind
    rank: int
    seconds: float
    memory: float
    feeds: tuple[tuple[int, float], ...]
    needs: int
    order: Sequence[int]
    filler: bool = False
    drains: bool = False
    opens: bool = False
    closes: bool = False
    around: Callable[[int], tuple[float, float]] | None = None
    unit: tuple[int, ...] = ()

    def action(self, microbatch: int) -> Action:
        return Action(self.stage, self.kind, microbatch)


@dataclass(frozen=True, kw_only=True)
class SchedulingProblem:
    """What the list scheduler is asked to order.

    key: smaller goes first among what a rank could run.  clock(stage, kind, micro-batch): the same, and
        an order of everything that keeps to the limits: an F runs ahead of its place in that order only if
        the rest of it then still keeps to them, so that limits can never block.
    depth: per stage its place in the order of the data; at equal times later stages go first.
    row_of: the exact order of everything but the fillers, per rank. One of these three is given.
    memory, open_rank, open_stage: limits; `inf` for none.
    before: before(a, b) is true if `a` must run before `b`, both on one rank.
    patience: share of its own time for which an action waits for a more urgent one that is on its way;
    overlap: share of a filler that may stick out of the gap it fills, before and in the drain.
    level: a filler also sticks out where the gap would leave its rank idle for longer than any other so far.
    early: which F may run ahead of their place in the safe order: "all", "warm" (until the rank's first B or
        I) or "none".
    together: together(a, b) is true if b may run with a as one unit, which takes joint(a, b) seconds. By a
        key that happens where both could run now.  paired: in fixed rows, a -> the b after it; both wait.
    """

    streams: tuple[Stream, ...]
    ranks: int
    key: Callable[[Action], object] | None = None
    clock: Callable[[int, Kind, int], float] | None = None
    depth: tuple[int, ...] = ()
    row_of: Rows[Action] | None = None
    memory: tuple[float, ...] = ()
    open_rank: tuple[float, ...] = ()
    open_stage: tuple[float, ...] = ()
    before: Callable[[Action, Action], bool] | None = None
    patience: float = 0.0
    overlap: tuple[float, float] = (0.0, 0.0)
    level: bool = False
    early: str = "all"
    together: Callable[[Action, Action], bool] | None = None
    paired: Mapping[Action, Action] = field(default_factory=dict)
    joint: Callable[[Action, Action], float] | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """rows: the actions of each rank.  step_s: until the last rank ends.  span_s: longest first-to-last time
    of a rank.  peak: most memory of each rank.  starts: of each rank when its actions begin, one entry per
    action.  pairs: neighbours that run as one unit."""

    rows: Sequence[tuple[Action, ...]]
    step_s: float
    span_s: float
    peak: tuple[float, ...]
    starts: tuple[NDArray[np.float64], ...] = field(repr=False, compare=False)
    pairs: tuple[Pair, ...] = ()
