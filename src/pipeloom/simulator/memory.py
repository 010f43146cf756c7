"""Memory of every rank over time, by kind.

    static       parameters, gradients, optimizer state, buffers: the whole step
    residuals    from the start of F to the end of B; after I only what W needs, until the end of W
    boundary     a message: at its sender from the start of the action that makes it until it has arrived;
                 at its receiver from the moment that the receive is posted, with its buffer, until the
                 receiver's B or W of that micro-batch ends.
                 Neighbours on one rank share one copy, from the maker's start to the user's end.
    transient    scratch of the running action

EVICT moves residuals to the rank's partner and FETCH moves them back (`ir.eviction`): the receiver has them
from the start, the giver until the end.

Without backwards nothing is kept: inputs go when F ends.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TypeAlias

from ..ir.action import RECV_B, RECV_F, SEND_F, Action, B, F, I, StageAction, Transfer, W
from ..ir.costs import STATIC_KINDS, StageCost
from ..ir.eviction import EVICT, FETCH, partner
from ..ir.flow import flow_of
from ..ir.operation import OPERATIONS
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..ir.timeline import MemoryCurve

KINDS = (*STATIC_KINDS, "residuals", "boundary", "transient")
_RESIDUALS, _BOUNDARY, _TRANSIENT = (KINDS.index(kind) for kind in ("residuals", "boundary", "transient"))


_Change: TypeAlias = tuple[float, int, int, int]
"""(time, order at that time, index into `KINDS`, bytes); order: 0 what another rank ends, 1 the own, 2 what
another begins."""


class Memory:
    """Collects changes, those of one rank in its own order; `result` sorts them by time.

    At equal times messages that are through go first, then the rank's own order decides: what ends goes
    before what begins comes. Residuals that a partner sends come last.
    """

    def __init__(self, program: Program, stages: StageGraph, costs: tuple[StageCost, ...]) -> None:
        flow = flow_of(stages)
        count = range(len(costs))
        self._placement = program.placement
        self._costs = costs
        self._training = any(
            isinstance(step, Action) and step.kind in (B, I, W) for row in program.rows for step in row
        )
        self._values = {edge: sum(v.bytes for v in values) for edge, values in stages.between.items()}
        self._gradients = {edge: sum(v.bytes for v in stages.gradients(*edge)) for edge in self._values}
        self._inputs = [sum(self._values[p, s] for p in flow.reads_from[s]) for s in count]
        self._outputs = [sum(self._values[s, r] for r in flow.read_by[s]) for s in count]
        self._gradients_in = [sum(self._gradients[s, r] for r in flow.gradients_from[s]) for s in count]
        self._gradients_out = [sum(self._gradients[p, s] for p in flow.gradients_to[s]) for s in count]
        self._changes: list[list[_Change]] = [[] for _ in program.rows]

    def message_bytes(self, message: Transfer) -> int:
        """Size of a message, from either of its ends."""
        table = self._values if message.kind in (SEND_F, RECV_F) else self._gradients
        along = message.kind in (SEND_F, RECV_B)
        return table[(message.stage, message.peer) if along else (message.peer, message.stage)]

    def start(self, time: float, action: Action) -> None:
        """An action begins: what it makes and its scratch are there from now on."""
        cost, stage = self._costs[action.stage], action.stage
        self._change(time, stage, _TRANSIENT, cost.transient_bytes.get(action.kind, 0))
        if action.kind == F:
            self._change(time, stage, _BOUNDARY, self._outputs[stage])
            if self._training:
                self._change(time, stage, _RESIDUALS, cost.residual_bytes)
        elif action.kind in (B, I):
            self._change(time, stage, _BOUNDARY, self._gradients_out[stage])
        elif action.kind == FETCH:
            self._change(time, stage, _RESIDUALS, cost.residual_bytes)
        elif action.kind == EVICT:
            self._lend(time, stage, cost.residual_bytes)
        elif action.kind in OPERATIONS:
            self._change(time, stage, _RESIDUALS, OPERATIONS[action.kind].acquired(stage))

    def end(self, time: float, action: Action) -> None:
        """An action is over: its scratch goes, and what no later action needs."""
        cost, stage = self._costs[action.stage], action.stage
        self._change(time, stage, _TRANSIENT, -cost.transient_bytes.get(action.kind, 0))
        if action.kind == B:
            self._change(time, stage, _RESIDUALS, -cost.residual_bytes)
        elif action.kind == I:
            self._change(time, stage, _RESIDUALS, cost.carried_bytes - cost.residual_bytes)
        elif action.kind == W:
            self._change(time, stage, _RESIDUALS, -cost.carried_bytes)
        elif action.kind == EVICT:
            self._change(time, stage, _RESIDUALS, -cost.residual_bytes)
        elif action.kind == FETCH:
            self._lend(time, stage, -cost.residual_bytes)
        elif action.kind in OPERATIONS:
            self._change(time, stage, _RESIDUALS, -OPERATIONS[action.kind].released(stage))
        if action.kind in (B, W):
            self._change(time, stage, _BOUNDARY, -self._inputs[stage] - self._gradients_in[stage])
        elif action.kind == F and not self._training:
            self._change(time, stage, _BOUNDARY, -self._inputs[stage])

    def scratch(self, start: float, end: float, step: StageAction) -> None:
        """A REDUCE or STEP runs."""
        size = self._costs[step.stage].transient_bytes.get(step.kind, 0)
        self._change(start, step.stage, _TRANSIENT, size)
        self._change(end, step.stage, _TRANSIENT, -size)

    def sent(self, arrival: float, message: Transfer) -> None:
        """The sender's copy of a message goes."""
        rank = self._placement[message.stage]
        self._changes[rank].append((arrival, 0, _BOUNDARY, -self.message_bytes(message)))

    def posted(self, time: float, message: Transfer) -> None:
        """The receiver has a buffer for a message."""
        self._change(time, message.stage, _BOUNDARY, self.message_bytes(message))

    def _change(self, time: float, stage: int, kind: int, size: int) -> None:
        if size:
            self._changes[self._placement[stage]].append((time, 1, kind, size))

    def _lend(self, time: float, stage: int, size: int) -> None:
        """The partner of a stage's rank keeps residuals for it, or is rid of them."""
        rank = partner(self._placement[stage], len(self._changes))
        if size:
            self._changes[rank].append((time, 2 if size > 0 else 0, _RESIDUALS, size))

    def result(self) -> tuple[tuple[MemoryCurve, ...], tuple[dict[str, int], ...]]:
        """The curve of each rank, and the bytes by kind at its peak."""
        curves: list[MemoryCurve] = []
        peaks: list[dict[str, int]] = []
        for rank, changes in enumerate(self._changes):
            own = [cost for cost, home in zip(self._costs, self._placement, strict=True) if home == rank]
            static = [sum(cost.static_bytes.get(kind, 0) for cost in own) for kind in STATIC_KINDS]
            changes.sort(key=itemgetter(0, 1))
            curve = _curve(rank, sum(static), changes)
            curves.append(curve)
            peaks.append(_peak(static, changes, curve.peak_bytes))
        return tuple(curves), tuple(peaks)


def _curve(rank: int, static: int, changes: list[_Change]) -> MemoryCurve:
    times, sizes, size = [0.0], [static], static
    for time, _, _, change in changes:
        size += change
        times.append(time)
        sizes.append(size)
    return MemoryCurve(rank=rank, times_s=tuple(times), sizes=tuple(sizes))


def _peak(static: list[int], changes: list[_Change], peak: int) -> dict[str, int]:
    now = static + [0] * (len(KINDS) - len(STATIC_KINDS))
    size = sum(static)
    for _, _, kind, change in changes:
        if size == peak:
            break
        size += change
        now[kind] += change
    return dict(zip(KINDS, now, strict=True))
