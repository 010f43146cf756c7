"""The rule for memory: no rank passes its cap, whatever the times.

What a rank holds at each action follows from its row alone, but for messages on their way and residuals
that a partner lends it: how long these stay depends on times, so here they count only where they are held
for certain. The peak found here is the least there can be; the simulator adds the rest, and the two agree
where messages take no room and nothing is lent.

Of a program that offloads, copies count as if they took no time: OFFLOAD frees its bytes, and RELOAD takes
them, where it stands. The simulator holds them longer while an OFFLOAD is under way; and it may hold less
where a RELOAD waits for the one before it, at most until the action that needs it. So what is certain is the
peak of the program with each RELOAD right in front of its RECOMPUTE, B or I.

Residuals that are recomputed in an action count from that RECOMPUTE on; those made again inside B, or I and
W, are in its transient bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ..ir.action import REDUCE, STEP, TREATMENTS, Action, B, F, I, Kind, StageAction, W
from ..ir.action_index import ActionIndex
from ..ir.columns import F_, RECOMPUTE_, Bools, Longs
from ..ir.costs import StageCost
from ..ir.errors import ScheduleError
from ..ir.flow import Flow, flow_of
from ..ir.operation import OPERATIONS
from ..ir.schedule import Program, Schedule
from ..ir.stages import StageGraph
from ..ir.units import format_bytes
from .schedules import check

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


def peaks(schedule: Schedule | Program, stages: StageGraph, costs: Sequence[StageCost]) -> tuple[Peak, ...]:
    """For each rank its peak, in one pass over its row.

    schedule: or a program, with what it does with residuals between forward and backward.

    >>> from pipeloom.ir.costs import equal_costs
    >>> from pipeloom.ir.flow import dag
    >>> from pipeloom.ir.schedule import parse_rows
    >>> made = Schedule(name="", microbatches=2, placement=(0,), rows=parse_rows(("0F0 0F1 0B0 0B1",)))
    >>> [(peak.bytes, str(peak.at)) for peak in peaks(made, dag(1, []), equal_costs(1, residual_bytes=10))]
    [(20, '0F1')]
    """
    account = _Account(schedule, stages, costs)
    found = []
    for rank in range(schedule.columns.ranks):
        static, sizes = account.static(rank), account.sizes(rank)
        best = Peak(rank=rank, bytes=static, static_bytes=static, at=None)
        if len(sizes):
            entry = int(np.argmax(sizes))
            best = replace(best, bytes=int(sizes[entry]), at=account.action(rank, entry))
        for step, size in account.optimizer(rank):
            if size > best.bytes:
                best = replace(best, bytes=size, at=step)
        found.append(best)
    return tuple(found)


def peak_bytes(
    schedule: Schedule | Program,
    stages: StageGraph,
    costs: Sequence[StageCost],
    caps: Sequence[float],
    *,
    show: Callable[[float], str] = format_bytes,
) -> None:
    """Every rank keeps to its cap at every action.

    caps: bytes per rank, `inf` for none.  show: how sizes are written in the message.
    The schedule is complete and in order on each rank (see `check`).
    Raises: ScheduleError that names the first action that passes a cap, by how much, and the remedy.
    """
    ranks, count = schedule.columns.ranks, len(schedule.placement)
    if len(caps) != ranks or len(costs) != count:
        raise ScheduleError(
            f"{len(caps)} caps and {len(costs)} stage costs for {ranks} ranks and {count} stages",
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
        sizes = account.sizes(rank)
        for position in np.flatnonzero(sizes > cap)[:1].tolist():
            raise _over(
                rank,
                account.action(rank, position),
                int(sizes[position]),
                cap,
                show,
                account.remedy(rank, position, cap),
            )
        for step, size in account.optimizer(rank):
            if size > cap:
                raise _over(
                    rank,
                    step,
                    size,
                    cap,
                    show,
                    "use smaller micro-batches or more stages: the optimizer itself does not fit",
                )


def _over(
    rank: int, at: Action | StageAction, size: int, cap: float, show: Callable[[float], str], hint: str
) -> ScheduleError:
    return ScheduleError(
        f"rank {rank} needs {show(size)} at {at}: {show(size - cap)} above its cap of {show(cap)}", hint=hint
    )


class _Account:
    """What each action of a schedule changes in the memory of its rank."""

    def __init__(self, schedule: Schedule | Program, stages: StageGraph, costs: Sequence[StageCost]) -> None:
        self.microbatches = schedule.microbatches
        columns = schedule.columns
        self.columns = columns if columns.is_compute.all() else columns.where(columns.is_compute)
        self.placement = schedule.placement
        self.stages = stages
        self.costs = costs
        self.flow: Flow = flow_of(stages)
        self.training = self.columns.trains
        table = [[self._change(s, kind) for kind in self.columns.kinds] for s in range(len(self.placement))]
        self.starts, self.ends = np.moveaxis(np.array(table, np.int64), 2, 0)
        self.dropped = np.array([cost.recomputed_bytes for cost in costs], np.int64)
        self.bare = self._bare()

    def _bare(self) -> Bools:
        """Which entries are an F that keeps less, as a RECOMPUTE makes the rest again."""
        bare = np.zeros(len(self.columns), np.bool_)
        if self.columns.treats_residuals:
            index = ActionIndex(self.columns, stages=len(self.placement), microbatches=self.microbatches)
            forward = index.of(F_)
            bare[forward[(forward >= 0) & (index.of(RECOMPUTE_) >= 0)]] = True
        return bare

    def static(self, rank: int) -> int:
        return sum(
            sum(cost.static_bytes.values())
            for cost, home in zip(self.costs, self.placement, strict=True)
            if home == rank
        )

    def action(self, rank: int, position: int) -> Action:
        found = self.columns.at(int(self.columns.offsets[rank]) + position)
        assert isinstance(found, Action)
        return found

    def sizes(self, rank: int) -> Longs:
        """Bytes held while each action of a row runs."""
        part = slice(*self.columns.offsets[rank : rank + 2].tolist())
        starts, ends = self._changes(part)
        held: Longs = self.static(rank) + np.cumsum(ends) - ends + starts
        return held

    def _changes(self, part: slice) -> tuple[Longs, Longs]:
        """Bytes that some entries add when they start, and what is left of them, or freed, when they end."""
        stage, kind = self.columns.stage[part], self.columns.kind[part]
        dropped = np.where(self.bare[part], self.dropped[stage], 0)
        return self.starts[stage, kind] - dropped, self.ends[stage, kind] - dropped

    def optimizer(self, rank: int) -> list[tuple[StageAction, int]]:
        """Bytes held while REDUCE and STEP run, at the end of a row; only those with scratch of their own."""
        if not self.training:
            return []
        own = [s for s, home in enumerate(self.placement) if home == rank]
        steps = [StageAction(stage, kind) for stage in own for kind in (REDUCE, STEP)]
        scratch = [(step, self.costs[step.stage].transient_bytes.get(step.kind, 0)) for step in steps]
        return [(step, self.static(rank) + size) for step, size in scratch if size]

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
        gains, gives = cost.residual_changes(kind)
        if (operation := OPERATIONS.get(kind)) is not None:
            gains, gives = operation.acquired(stage), operation.released(stage)
        return gains + scratch, gains - gives

    def _values(self, sources: Sequence[int], reader: int, *, far: bool) -> int:
        """Bytes that `reader` reads from `sources` on other ranks, or on its own."""
        return sum(
            v.bytes
            for s in sources
            if (self.placement[s] != self.placement[reader]) is far
            for v in self.stages.between.get((s, reader), ())
        )

    def _gradients(self, source: int, readers: Sequence[int], *, far: bool) -> int:
        """Bytes of the gradients that come back to `source` from `readers` on other ranks, or on its own."""
        return sum(
            v.bytes
            for r in readers
            if (self.placement[r] != self.placement[source]) is far
            for v in self.stages.gradients(source, r)
        )

    def remedy(self, rank: int, position: int, cap: float) -> str:
        """What to do about the action at `position`: move in front of it what frees enough, if that helps."""
        row = self._row(rank)
        first = int(self.columns.offsets[rank])
        starts, ends = self._changes(slice(first, first + len(row)))
        smaller = "use smaller micro-batches or more stages"
        at = row[position]
        alone = self.static(rank) + int(starts[position])
        if alone > cap:
            return f"{smaller}: {at} alone does not fit, however few micro-batches are in flight"
        need = float(self.sizes(rank)[position]) - cap
        chosen: list[Action] = []
        for later in self._movable(row, position):
            chosen.append(row[later])
            need += float(ends[later])
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
        rows = [self._row(r) for r in range(self.columns.ranks)]
        row = rows[rank]
        rest = [action for action in row[position:] if action not in chosen]
        rows[rank] = (*row[:position], *chosen, *rest)
        # What is done with residuals waits for no other rank, and stays in order.
        ordered = tuple(tuple(a for a in row if a.kind not in TREATMENTS) for row in rows)
        moved = Schedule(name="", microbatches=self.microbatches, placement=self.placement, rows=ordered)
        try:
            check(moved, self.stages)
        except ScheduleError:
            return False
        return True

    def _row(self, rank: int) -> tuple[Action, ...]:
        return self.columns.row(rank)  # type: ignore[return-value]  # only compute actions are left in it

    def _movable(self, row: Sequence[Action], position: int) -> list[int]:
        """Places of later actions of a row that could run before `position`, in order.

        Those whose forward stands earlier; an I before its W, and in front of it what it needs to be back.
        """
        done = {(a.stage, a.microbatch) for a in row[:position] if a.kind == F}
        kinds = (B, I, W, *TREATMENTS)
        return [
            place
            for place in range(position + 1, len(row))
            if row[place].kind in kinds and (row[place].stage, row[place].microbatch) in done
        ]
