"""Shape: what a recipe is written for, and the questions it may ask about it; and clocks that repeat."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from ...ir.action import Action, B, F, I, Kind, W
from ...ir.costs import StageCost, action_seconds
from ...ir.errors import ScheduleError, did_you_mean
from ...ir.flow import Flow, flow_of
from ...ir.operation import OPERATIONS
from ...ir.stages import StageGraph
from .uplinks import Uplinks


@dataclass(frozen=True)
class Periodic:
    """A clock for recipes in which each micro-batch runs `period` after the one before.

    first: (stage, kind) -> when micro-batch 0 runs; kinds that are not in there run with B.

    >>> Periodic({(0, Kind("F")): 1.0, (0, B): 4.0}, period=3.0)(0, B, 2)
    10.0
    """

    first: Mapping[tuple[int, Kind], float]
    period: float

    def __call__(self, stage: int, kind: Kind, microbatch: int) -> float:
        own = self.first.get((stage, kind))
        return (self.first[stage, B] if own is None else own) + self.period * microbatch


MOST_SETS = 64
"""Sets of ranks, visited on the ways to one stage, up to which `Shape.depth` is exact."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Stages, where they sit, how many micro-batches, and what everything takes.

    placement: rank of each stage.  costs: one per stage.  transfer_s: seconds that a message takes between
        ranks, the same for all or by (from stage, to stage).
    limit_bytes: most bytes of residuals a rank may hold, one number or one per rank; or None. The costs must
        then say what residuals take.
    uplinks: through which copies to the host go; None if each rank has its own.  room_bytes: what each rank
        has for residuals, where `fit=1` asks for copies until they fit.
    options: numbers that a family reads, such as `group`.  shortest: "step", or "span" if of a family's
        recipes the one with the shortest time from a rank's first action to its last is wanted.
    """

    stages: StageGraph
    placement: tuple[int, ...]
    microbatches: int
    costs: tuple[StageCost, ...]
    transfer_s: float | Callable[[int, int], float] = 0.0
    limit_bytes: float | tuple[float, ...] | None = None
    uplinks: Uplinks | None = None
    room_bytes: tuple[float, ...] | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    shortest: str = "step"

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def flow(self) -> Flow:
        return flow_of(self.stages)

    @cached_property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """Per rank its stages, in the order of the data."""
        stages: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage in self.flow.order:
            stages[self.placement[stage]].append(stage)
        return tuple(map(tuple, stages))

    @cached_property
    def chunks(self) -> int:
        return max(map(len, self.rank_stages))

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """Per stage its number among the stages of its rank, 0 for the first in the order of the data."""
        chunk = [0] * len(self.placement)
        for stages in self.rank_stages:
            for number, stage in enumerate(stages):
                chunk[stage] = number
        return tuple(chunk)

    @cached_property
    def ahead(self) -> tuple[int, ...]:
        """Per stage the most rank changes on a path from it to a stage that nothing reads."""
        ahead = [0] * len(self.placement)
        for stage in reversed(self.flow.order):
            ahead[stage] = max(
                (ahead[r] + (self.placement[r] != self.placement[stage]) for r in self.flow.read_by[stage]),
                default=0,
            )
        return tuple(ahead)

    @cached_property
    def depth(self) -> int:
        """Ranks of the longest way through the pipeline: the most different ranks on one path.

        So many micro-batches are in flight before the first gradient is back, and families limit what is
        held by it. On every chain, whatever its placement, it is the number of ranks; stages side by side
        count once. Source: "pipeline depth", arXiv 2406.17145.

        >>> from pipeloom.ir.flow import dag
        >>> from pipeloom.schedules.registry import shape_of
        >>> towers = dag(5, [(0, 1), (1, 4), (2, 3), (3, 4)])
        >>> shape_of(5, stages=towers, microbatches=8).depth, shape_of(5, microbatches=8).depth
        (3, 5)
        """
        # No path has more ranks than it changes ranks, and one more. It has as many where it never comes
        # back to a rank, as with one stage per rank; and on a chain, where it comes to all ranks.
        most = min(self.ranks, max(self.ahead) + 1)
        if self.chunks == self.stages.replicas:
            return most
        # Per stage the sets of ranks that paths up to it visit, as bits; a set within another one goes. Where
        # there are many, `most`, which is never less.
        visited: list[list[int]] = [[] for _ in self.placement]
        for stage in self.flow.order:
            own = 1 << self.placement[stage]
            found = {own | ranks for r in self.flow.reads_from[stage] for ranks in visited[r]} or {own}
            if len(found) > MOST_SETS:
                return most
            # a | b == b: a is a part of b. Whatever follows, the path of b visits no fewer ranks.
            visited[stage] = [a for a in found if not any(a != b and a | b == b for b in found)]
        return max(ranks.bit_count() for sets in visited for ranks in sets)

    @cached_property
    def limits_bytes(self) -> tuple[float, ...]:
        limit = self.limit_bytes
        if not isinstance(limit, tuple):
            return (inf if limit is None else float(limit),) * self.ranks
        self.require(len(limit) == self.ranks, f"{len(limit)} limits for {self.ranks} ranks", "give one each")
        return limit

    def option(self, name: str, default: float) -> float:
        return self.options.get(name, default)

    def seconds(self, stage: int, kind: Kind) -> float:
        """How long an action takes; on the slowest of its ranks, if the stage spans several."""
        if kind not in OPERATIONS and not self.flow.shards:
            return self.costs[stage].seconds(kind)
        together = (stage, *self.flow.shards.get(stage, ()))
        return max(action_seconds(self.costs, Action(s, kind, 0)) for s in together)

    @cached_property
    def period_s(self) -> float:
        """Busy seconds of the busiest rank for one micro-batch: no order can be faster in the long run."""
        return max(sum(self.seconds(s, F) + self.seconds(s, B) for s in own) for own in self.rank_stages)

    @cached_property
    def even(self) -> bool:
        """Whether F, I and W take the same time everywhere and transfers none: the textbook case."""
        times = {self.seconds(s, kind) for s in range(len(self.placement)) for kind in (F, I, W)}
        late = any(self.delay_s(a, b) for a, b in self.stages.between)
        return len(times) == 1 and not late

    def delay_s(self, source: int, target: int) -> float:
        """Seconds from the end of an action until its message is there; 0 on one rank."""
        if self.placement[source] == self.placement[target]:
            return 0.0
        return self.transfer_s(source, target) if callable(self.transfer_s) else self.transfer_s

    def require(self, good: bool, problem: str, hint: str) -> None:
        if not good:
            raise ScheduleError(problem, hint=hint)


def options(shape: Shape, **defaults: float) -> Mapping[str, float]:
    """The options of a family with their defaults. Raises: ScheduleError if the user gave another one."""
    for name in shape.options:
        if name not in defaults:
            known = f"its options: {', '.join(defaults)}" if defaults else "leave it out: there are none"
            raise ScheduleError(
                f"this schedule has no option {name!r}",
                hint=did_you_mean(name, defaults, known),
            )
    return {**defaults, **shape.options}


def path_clock(
    shape: Shape,
    forward: Sequence[float] = (1.0,),
    backward: Sequence[float] = (1.0,),
    *,
    turns: tuple[float, float, float] = (0.0, 0.0, 0.0),
    real: bool = False,
    period: float | None = None,
    kinds: str = "FIW",
) -> Periodic:
    """A clock that starts one micro-batch per period and lets it travel at a chosen pace.

    The pace decides how long residuals live, so how many are held: a rank holds lifespan / period of them.

    forward, backward: slots from a rank to the next, per chunk in the order of travel (backward begins
        with the last chunk); the last number holds for further chunks.
    turns: slots of rest where a micro-batch goes on to a stage of the same rank in its forward; where it
        turns from forward to backward; and where it goes on to a stage of the same rank in its backward.
    real: slots are as long as the actions they stand for, not all equal.
    Source of the idea: building blocks, arXiv 2405.15362; here for any DAG, placement and times.
    """
    flow, chunk = shape.flow, shape.chunk

    def pace(table: Sequence[float], number: int) -> float:
        return table[min(number, len(table) - 1)]

    def slot(stage: int, kind: Kind) -> float:
        if real:
            return shape.seconds(stage, kind)
        return 2.0 if kind == B else 1.0

    def leave(
        start: Mapping[int, float], edge: tuple[int, int], kind: Kind, hops: float, rest: float
    ) -> float:
        source, target = edge
        same = shape.placement[source] == shape.placement[target]
        delay = shape.delay_s(source, target) if real else 0.0
        return start[source] + slot(source, kind) * (1.0 + rest if same else hops) + delay

    start: dict[int, float] = {}
    for s in flow.order:
        hops = pace(forward, chunk[s])
        start[s] = max((leave(start, (r, s), F, hops, turns[0]) for r in flow.reads_from[s]), default=0.0)
    back: dict[int, float] = {}
    kind = Kind(kinds[1])
    for s in reversed(flow.order):
        hops = pace(backward, len(shape.rank_stages[shape.placement[s]]) - 1 - chunk[s])
        own = start[s] + slot(s, F) * (1.0 + turns[1])
        back[s] = max(
            (leave(back, (r, s), kind, hops, turns[2]) for r in flow.gradients_from[s]), default=own
        )
    busy = (sum(slot(s, Kind(k)) for s in own for k in kinds) for own in shape.rank_stages)
    step = period if period is not None else max(busy)
    first = {(s, F): at for s, at in start.items()}
    for s, at in back.items():
        first[s, B] = first[s, I] = at
        if "W" in kinds:
            first[s, W] = at + slot(s, I)
    return Periodic(first, step)
