"""The rule for memory: no rank passes its cap, whatever the times.

What a rank holds at each action follows from its row alone, but for messages on their way and residuals
that a partner lends it: how long these stay depends on times, so here they count only where they are held
for certain. The peak found here is the least there can be; the simulator adds the rest, and the two agree
where messages take no room and nothing is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from .action import REDUCE, STEP, Action, B, F, I, Kind, StageAction, W
from .check import check
from .costs import StageCost
from .errors import ScheduleError
from .eviction import EVICT, FETCH
from .flow import Flow, flow_of
from .operation import OPERATIONS
from .schedule import Schedule
from .stages import StageGraph
from .units import format_bytes

_Change: TypeAlias = tuple[int, int]
"""Bytes that an action adds when it starts, and what is left of them, or freed, when it ends."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a rank holds for certain. static_bytes: the part that is held all the time.

    at: the first action with that much; None for a rank without actions.
    """

    rank: int
    bytes: int
    static_bytes: int
    at: Action | StageAction | None


def peaks(schedule: Schedule, stages: StageGraph, costs: Sequence[StageCost]) -> tuple[Peak, ...]:
    """For each rank its peak, in one pass over its row.

    >>> from pipeloom.ir.costs import equal_costs
    >>> from pipeloom.ir.flow import dag
    >>> from pipeloom.ir.schedule import parse_rows
    >>> made = Schedule(name="", microbatches=2, placement=(0,), rows=parse_rows(("0F0 0F1 0B0 0B1",)))
    >>> [(peak.bytes, str(peak.at)) for peak in peaks(made, dag(1, []), equal_costs(1, residual_bytes=10))]
    [(20, '0F1')]
    """
    account = _Account(schedule, stages, costs)
    found = []
    for rank in range(schedule.ranks):
        static = account.static(rank)
        best = Peak(rank=rank, bytes=static, static_bytes=static, at=None)
        for action, _, size in account.walk(rank):
            if size > best.bytes or best.at is None:
                best = Peak(rank=rank, bytes=size, static_bytes=static, at=action)
        found.append(best)
    return tuple(found)


def peak_bytes(
    schedule: Schedule, stages: StageGraph, costs: Sequence[StageCost], caps: Sequence[float],
    *, show: Callable[[float], str] = format_bytes,
) -> None:  # fmt: skip
    """Every rank keeps to its cap at every action.

    caps: bytes per rank, `inf` for none.  show: how sizes are written in the message.
    The schedule is complete and in order on each rank (see `check`).
    Raises: ScheduleError that names the first action that passes a cap, by how much, and the remedy.
    """
    if len(caps) != schedule.ranks or len(costs) != schedule.stages:
        raise ScheduleError(
            f"{len(caps)} caps and {len(costs)} stage costs for {schedule.ranks} ranks and "
            f"{schedule.stages} stages",
            hint="give one cap per rank and one StageCost per stage",
        )
    account = _Account(schedule, stages, costs)
    for rank, cap in enumerate(caps):
        static = account.static(rank)
        if static > cap:
            raise ScheduleError(
                f"rank {rank} holds {show(static)} of parameters, gradients and optimizer state before its "
                f"first action: {show(static - cap)} above its cap of {show(cap)}",
                hint="use more stages, or give the rank more memory: no order of actions helps",
            )
        for action, position, size in account.walk(rank):
            if size > cap:
                raise ScheduleError(
                    f"rank {rank} needs {show(size)} at {action}: {show(size - cap)} above its cap of "
                    f"{show(cap)}",
                    hint=account.remedy(rank, position, cap),
                )


class _Account:
    """What each action of a schedule changes in the memory of its rank."""

    def __init__(self, schedule: Schedule, stages: StageGraph, costs: Sequence[StageCost]) -> None:
        self.schedule = schedule
        self.rows = schedule.rows
        self.placement = schedule.placement
        self.stages = stages
        self.costs = costs
        self.flow: Flow = flow_of(stages)
        self.training = any(action.kind in (B, I, W) for row in schedule.rows for action in row)
        self.table: dict[tuple[int, Kind], _Change] = {}

    def static(self, rank: int) -> int:
        return sum(
            sum(cost.static_bytes.values())
            for cost, home in zip(self.costs, self.placement, strict=True) if home == rank
        )  # fmt: skip

    def walk(self, rank: int) -> Iterator[tuple[Action | StageAction, int, int]]:
        """Each action of a row, its place in it, and the bytes held while it runs; the optimizer at last."""
        held = self.static(rank)
        row = self.rows[rank]
        for position, action in enumerate(row):
            start, end = self.change(action.stage, action.kind)
            yield action, position, held + start
            held += end
        if self.training:
            for stage in (s for s, home in enumerate(self.placement) if home == rank):
                for kind in (REDUCE, STEP):
                    if scratch := self.costs[stage].transient_bytes.get(kind, 0):
                        yield StageAction(stage, kind), len(row), held + scratch

    def change(self, stage: int, kind: Kind) -> _Change:
        """Bytes on top while an action runs, and after it, on its own rank."""
        if (stage, kind) not in self.table:
            self.table[stage, kind] = self._change(stage, kind)
        return self.table[stage, kind]

    def _change(self, stage: int, kind: Kind) -> _Change:
        cost, flow = self.costs[stage], self.flow
        scratch = cost.transient_bytes.get(kind, 0)
        inputs = self._values(flow.reads_from[stage], stage, far=True)
        gradients = self._gradients(stage, flow.gradients_from[stage], far=True)
        used = inputs + self._values(flow.reads_from[stage], stage, far=False)
        used += gradients + self._gradients(stage, flow.gradients_from[stage], far=False)
        if kind == F:
            sent = sum(self._values((stage,), r, far=True) for r in flow.read_by[stage])
            near = sum(self._values((stage,), r, far=False) for r in flow.read_by[stage])
            kept = near + inputs + (cost.residual_bytes if self.training else 0)
            freed = 0 if self.training else used
            return kept + sent + scratch, kept - freed
        if kind in (B, I):
            sent = sum(self._gradients(p, (stage,), far=True) for p in flow.gradients_to[stage])
            near = sum(self._gradients(p, (stage,), far=False) for p in flow.gradients_to[stage])
            kept = near + gradients
            left = -cost.residual_bytes + (cost.carried_bytes if kind == I else -used)
            return kept + sent + scratch, kept + left
        if kind == W:
            return scratch, -cost.carried_bytes - used
        if kind == EVICT:
            return scratch, -cost.residual_bytes
        if kind == FETCH:
            return cost.residual_bytes + scratch, cost.residual_bytes
        operation = OPERATIONS.get(kind)
        gains, gives = (operation.acquired(stage), operation.released(stage)) if operation else (0, 0)
        return gains + scratch, gains - gives

    def _values(self, sources: Sequence[int], reader: int, *, far: bool) -> int:
        """Bytes that `reader` reads from `sources` on other ranks, or on its own."""
        return sum(
            v.bytes for s in sources if (self.placement[s] != self.placement[reader]) is far
            for v in self.stages.between.get((s, reader), ())
        )  # fmt: skip

    def _gradients(self, source: int, readers: Sequence[int], *, far: bool) -> int:
        """Bytes of the gradients that come back to `source` from `readers` on other ranks, or on its own."""
        return sum(
            v.bytes for r in readers if (self.placement[r] != self.placement[source]) is far
            for v in self.stages.gradients(source, r)
        )  # fmt: skip

    def remedy(self, rank: int, position: int, cap: float) -> str:
        """What to do about the action at `position`: move in front of it what frees enough, if that helps."""
        row = self.rows[rank]
        smaller = "use smaller micro-batches or more stages"
        if position >= len(row):
            return f"{smaller}: the optimizer itself does not fit"
        at = row[position]
        alone = self.static(rank) + self.change(at.stage, at.kind)[0]
        if alone > cap:
            return f"{smaller}: {at} alone does not fit, however few micro-batches are in flight"
        need = next(size for _, p, size in self.walk(rank) if p == position) - cap
        chosen: list[Action] = []
        for action, freed in self._movable(row, position):
            chosen.append(action)
            need -= freed
            if need <= 0:
                break
        which = " ".join(map(str, chosen))
        if need > 0:
            return f"{smaller}: nothing that rank {rank} could run before {at} frees enough"
        if not self._may_move(rank, position, chosen):
            return (
                f"keep fewer in flight on every rank: {which} could run before {at} if the other ranks did "
                f"not wait for {at} first; or {smaller}"
            )
        return f"keep fewer in flight: move {which} in front of {at}, or {smaller}"

    def _may_move(self, rank: int, position: int, chosen: list[Action]) -> bool:
        """Whether no other rank needs what `position` makes before it runs what the chosen ones wait for."""
        row = self.rows[rank]
        rest = [action for action in row[position:] if action not in chosen]
        rows = list(self.rows)
        rows[rank] = (*row[:position], *chosen, *rest)
        try:
            check(replace(self.schedule, rows=tuple(rows), pairs=()), self.stages)
        except ScheduleError:
            return False
        return True

    def _movable(self, row: Sequence[Action], position: int) -> list[tuple[Action, int]]:
        """Later actions of a row that could run before `position`, in order, and the bytes that each frees.

        Those whose forward stands earlier; an I before its W.
        """
        done = {(a.stage, a.microbatch) for a in row[:position] if a.kind == F}
        found = []
        for action in row[position:]:
            if action.kind in (B, I, W) and (action.stage, action.microbatch) in done:
                found.append((action, -self.change(action.stage, action.kind)[1]))
        return found
