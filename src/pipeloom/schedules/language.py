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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeAlias

from ..ir.action import AFTER, Action, B, F, I, Kind, W
from ..ir.errors import DeadlockError, ScheduleError
from .engine import EPS, Outcome, Stream, Task, run
from .shape import Shape, path_clock

__all__ = ["Operation", "Recipe", "Shape", "best", "fastest", "path_clock", "phases", "timings", "turns"]

PerRank: TypeAlias = Callable[[int], float]
RowMaker: TypeAlias = Callable[[int], Iterable[Action]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A registered kind that a recipe adds once per micro-batch to some stages.

    kind: from `ir.action.register_kind`, which also says after which kind it runs.
    stages: which stages have it; all by default.  memory: change that its start makes, in residuals of the
    stage: above 0 it holds more, below 0 it gives back. How long it takes: `StageCost.other_s`.
    """

    kind: Kind
    stages: Callable[[int], bool] = lambda stage: True
    memory: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to order everything.

    kinds: "FB" or "FIW", for all stages or as a function of the stage; "F" for evaluation.
    priority, clock, rows: the order, see the module.  before(a, b): `a` goes first where both are next.
    memory: most residuals of a rank, in micro-batches: a stage of a rank with v stages counts 1/v, from F
        until B or W.  in_flight: most micro-batches of a rank, counted per stage, between F and B or I.
    in_flight_stage: the same of one stage.
    fill: kinds that run only where nothing else can, so that they fill gaps.
    early: which forwards may run before their turn in a clock: "all", "warm" (only until the rank's first
        backward) or "none".
    patience, overlap: see `engine.Task`.
    insert: further operations.  slices: sequence slices of each micro-batch; forwards ascend, backwards
        descend in each micro-batch, and every slice is an action of its own.
    """

    kinds: str | Callable[[int], str] = "FB"
    priority: Callable[[Action], object] | None = None
    clock: Callable[[int, Kind, int], float] | None = None
    rows: Sequence[Sequence[Action]] | RowMaker | None = None
    before: Callable[[Action, Action], bool] | None = None
    memory: PerRank | float | None = None
    in_flight: PerRank | None = None
    in_flight_stage: PerRank | None = None
    fill: str = "W"
    early: str = "all"
    patience: float = 0.0
    overlap: float = 0.0
    insert: tuple[Operation, ...] = ()
    slices: int = 1

    def __post_init__(self) -> None:
        orders = [name for name in ("priority", "clock", "rows") if getattr(self, name) is not None]
        if len(orders) != 1:
            raise ScheduleError(
                f"a recipe with {' and '.join(orders) or 'no order'}",
                hint="give exactly one of priority=, clock= and rows=; before= may go with any",
            )

    def kinds_of(self, stage: int) -> tuple[Kind, ...]:
        """The built-in and added kinds that a stage runs for each micro-batch."""
        text = self.kinds if isinstance(self.kinds, str) else self.kinds(stage)
        if text not in ("F", "FB", "FIW"):
            raise ScheduleError(f"stage {stage} has the kinds {text!r}", hint="use F, FB or FIW, and insert=")
        return (*map(Kind, text), *(o.kind for o in self.insert if o.stages(stage)))


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


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a recipe gives for a shape: the rows, and when the list scheduler expects what."""

    recipe: Recipe
    outcome: Outcome = field(repr=False)


def make(shape: Shape, recipe: Recipe) -> Made:
    """Order everything as one recipe says.

    Raises: DeadlockError if its limits block; ScheduleError if it does not fit the shape.
    """
    return Made(recipe=recipe, outcome=run(_task(shape, recipe)))


def best(shape: Shape, recipes: Recipe | Sequence[Recipe]) -> Made:
    """The fastest of some recipes: the shortest step, then the shortest span of a rank.

    Raises: what the last recipe raised, if none works.
    """
    tries = [recipes] if isinstance(recipes, Recipe) else list(recipes)
    if len(tries) == 1:
        return make(shape, tries[0])
    found: Made | None = None
    problem: ScheduleError | None = None
    bound = lower_bound_s(shape)
    for recipe in tries:
        try:
            made = make(shape, recipe)
        except DeadlockError as error:
            problem = error
            continue
        if found is None or _cost(made) < _cost(found):
            found = made
        if found.outcome.step_s <= bound + EPS:
            break
    if found is None:
        assert problem is not None
        raise problem
    return found


def fastest(shape: Shape, family: Callable[[Shape], Recipe | Sequence[Recipe]]) -> Made:
    """The fastest recipe of a family. With many micro-batches the two that are best on twice as many as
    ranks are tried: what recipes differ in is mostly how they begin and end.

    Raises: what the last recipe raised, if none works.
    """
    given = family(shape)
    recipes = [given] if isinstance(given, Recipe) else list(given)
    few = 2 * shape.ranks
    if len(recipes) < 3 or shape.microbatches <= few:
        return best(shape, recipes)
    small = replace(shape, microbatches=few)
    tries = family(small)
    assert not isinstance(tries, Recipe)
    scores: list[tuple[tuple[float, float], int]] = []
    for index, recipe in enumerate(tries):
        try:
            made = make(small, recipe)
        except DeadlockError:
            continue
        scores.append((_cost(made), index))
        if made.outcome.step_s <= lower_bound_s(small) + EPS:
            break
    try:
        return best(shape, [recipes[index] for _, index in sorted(scores)[:2]] or recipes)
    except DeadlockError:  # more micro-batches may need more room
        return best(shape, recipes)


def _cost(made: Made) -> tuple[float, float]:
    return round(made.outcome.step_s, 9), round(made.outcome.span_s, 9)


def lower_bound_s(shape: Shape) -> float:
    """No order is faster: each rank begins when its first data can be there, and then is never idle."""
    start: dict[int, float] = {}
    for s in shape.flow.order:
        start[s] = max(
            (start[r] + shape.seconds(r, F) + shape.delay_s(r, s) for r in shape.flow.reads_from[s]),
            default=0.0,
        )
    busy = [sum(shape.seconds(s, F) + shape.seconds(s, B) for s in own) for own in shape.own]
    return max(min(start[s] for s in own) + shape.microbatches * busy[r] for r, own in enumerate(shape.own))


def _task(shape: Shape, recipe: Recipe) -> Task:
    streams = _streams(shape, recipe)
    clock, rows = recipe.clock, recipe.rows
    key: Callable[[Action], object] | None = recipe.priority
    if clock is not None:
        given = clock
        place = {s: i for i, s in enumerate(shape.flow.order)}

        def by_clock(a: Action) -> object:
            return given(a.stage, a.kind, a.microbatch), a.kind == F, -place[a.stage]

        key = by_clock
    fixed = None
    if rows is not None:
        listed = [rows(r) for r in range(shape.ranks)] if callable(rows) else rows
        loose = set(recipe.fill)
        fixed = tuple(tuple(a for a in row if a.kind not in loose) for row in listed)
    memory, limits = _memory(shape, recipe)
    open_rank = tuple(map(recipe.in_flight, range(shape.ranks))) if recipe.in_flight else ()
    stages = range(len(shape.placement))
    open_stage = tuple(map(recipe.in_flight_stage, stages)) if recipe.in_flight_stage else ()
    return Task(
        streams=tuple(replace(s, memory=memory(s)) for s in streams), ranks=shape.ranks, key=key,
        row_of=fixed, safe=clock is not None, memory=limits, open_rank=open_rank, open_stage=open_stage,
        before=recipe.before, patience=recipe.patience, overlap=recipe.overlap, early=recipe.early,
    )  # fmt: skip


def _memory(shape: Shape, recipe: Recipe) -> tuple[Callable[[Stream], float], tuple[float, ...]]:
    """What each stream adds or gives back, and each rank's limit: in bytes if the shape limits bytes."""
    added = {o.kind: o.memory for o in recipe.insert}

    def residual(stage: int) -> tuple[float, float]:
        cost = shape.costs[stage]
        if shape.limit_bytes is not None:
            return float(cost.residual_bytes), float(cost.carried_bytes)
        return (share := 1.0 / len(shape.own[shape.placement[stage]])), share

    def change(s: Stream) -> float:
        held, carried = residual(s.stage)
        table = {F: held, B: -held, I: carried - held, W: -carried}
        return table[s.kind] if s.kind in table else added.get(s.kind, 0.0) * held

    if shape.limit_bytes is not None:
        return change, (shape.limit_bytes,) * shape.ranks
    if recipe.memory is None:
        return change, (inf,) * shape.ranks
    limit = recipe.memory
    given = limit if callable(limit) else (lambda rank: limit)
    return change, tuple(float(given(rank)) for rank in range(shape.ranks))


def _streams(shape: Shape, recipe: Recipe) -> list[Stream]:
    flow = shape.flow
    kinds = [recipe.kinds_of(s) for s in range(len(shape.placement))]
    index: dict[tuple[int, Kind], int] = {}
    for s, own in enumerate(kinds):
        for kind in own:
            index[s, kind] = len(index)
    back = [next((k for k in own if k in (B, I)), None) for own in kinds]
    feeds: dict[tuple[int, Kind], list[tuple[int, float]]] = {key: [] for key in index}
    needs = dict.fromkeys(index, 0)

    def edge(source: tuple[int, Kind], target: tuple[int, Kind]) -> None:
        feeds[source].append((index[target], shape.delay_s(source[0], target[0])))
        needs[target] += 1

    for s, own in enumerate(kinds):
        mine = back[s]
        for reader in flow.read_by[s]:
            edge((s, F), (reader, F))
        if mine is not None:
            edge((s, F), (s, mine))
            for reader in flow.gradients_from[s]:
                other = back[reader]
                assert other is not None
                edge((reader, other), (s, mine))
        if W in own:
            edge((s, I), (s, W))
        for kind in own:
            if kind in AFTER:
                after = mine if AFTER[kind] in (B, I) and mine is not None else AFTER[kind]
                edge((s, after), (s, kind))
    return [
        Stream(
            stage=s, kind=kind, rank=shape.placement[s], seconds=shape.seconds(s, kind), memory=0.0,
            feeds=tuple(feeds[s, kind]), needs=needs[s, kind], order=_order(shape, recipe, kind),
            filler=kind in recipe.fill, opens=kind == F, closes=kind in (B, I),
        )
        for s, kind in index
    ]  # fmt: skip


def _order(shape: Shape, recipe: Recipe, kind: Kind) -> Sequence[int]:
    """Micro-batches in the order in which a stream runs them; slices go back where they came from."""
    if recipe.slices == 1 or kind == F:
        return range(shape.microbatches)
    k = recipe.slices
    return [low + k - 1 - i for low in range(0, shape.microbatches, k) for i in range(k)]


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
