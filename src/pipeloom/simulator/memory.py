"""Memory of every rank over time, by kind.

    static       parameters, gradients, optimizer state, buffers: the whole step
    residuals    from the start of F to the end of B; after I only what W needs, until the end of W.
                 What OFFLOAD copies to the host is here until it ends, and again from the start of RELOAD;
                 what F drops is here from the start of RECOMPUTE
    boundary     a message: at its sender from the start of the action that makes it until it has arrived,
                 or, of forecasts, until its sender notices (see `with_held_sends`);
                 at its receiver from the moment that the receive is posted, with its buffer, until the
                 receiver's B or W of that micro-batch ends.
                 Neighbours on one rank share one copy, from the maker's start to the user's end.
    transient    scratch of the running action

Host memory: what OFFLOAD copies, from its start until the end of RELOAD.

Inputs go when F ends if no backward reads them (`StageCost.keeps_inputs`), or where there are no backwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..ir.action import B, F, I, Kind, W
from ..ir.columns import F_, OFFLOAD_, RECOMPUTE_, RELOAD_, SEND_B_, SEND_F_, Bools, Floats, Longs, starts_of
from ..ir.costs import STATIC_KINDS, StageCost
from ..ir.flow import Flow, flow_of
from ..ir.operation import OPERATIONS
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..ir.timeline import MemoryCurve
from .layout import message_bytes
from .loop_state import ProgramLayout, SimulatorState
from .memory_replay import MOST_RESIDUALS, RESIDUALS, MemoryChanges, ReplayOutput, Step, replay

KINDS = (*STATIC_KINDS, "residuals", "boundary", "transient")
"""The last three in the order of `replay`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """What every rank held in a simulation that has run. Curves are made when they are asked for."""

    layout: ProgramLayout
    state: SimulatorState
    changes: MemoryChanges
    static: Sequence[Sequence[int]]
    begin_s: Floats
    offloaded: Longs
    """Bytes that OFFLOAD copies, by stage."""
    gone_s: Floats | None = None
    """When each message's sender lets go of it; None for when it is through."""

    @property
    def step(self) -> Step:
        """What is replayed: messages are through when their senders let go of them."""
        late = self.state if self.gone_s is None else self.state._replace(transfer_end=self.gone_s)
        return Step(self.layout, late, self.changes)

    def peaks(self) -> tuple[Mapping[str, int], ...]:
        """Per rank the bytes by kind at its first peak."""
        return tuple(
            dict(zip(KINDS, (*static, *own), strict=True))
            for static, own in zip(self.static, self._highest[:, :MOST_RESIDUALS].tolist(), strict=True)
        )

    def residual_peaks(self) -> tuple[int, ...]:
        """Per rank the most bytes of residuals, which need not be when it holds most of everything."""
        return tuple(self._highest[:, MOST_RESIDUALS].tolist())

    @cached_property
    def _highest(self) -> Longs:
        """(ranks, 4), see `ReplayOutput.at_peak`."""
        ranks = len(self.static)
        at_peak = np.zeros((ranks, MOST_RESIDUALS + 1), np.int64)
        none = np.zeros(0)
        replay(self.step, (0, ranks), ReplayOutput(at_peak, none, none.astype(np.int64)))
        return at_peak

    def curve(self, rank: int) -> MemoryCurve:
        """Bytes over time of one rank."""
        p = self.layout
        most = 2 * int(p.offsets[rank + 1] - p.offsets[rank]) + 1
        first = p.first_message
        most += sum(int(first[c + 1] - first[c]) for c in self.changes.outgoing(rank))
        times, sizes = np.zeros(most), np.zeros(most, np.int64)
        at_peak = np.zeros((len(self.static), MOST_RESIDUALS + 1), np.int64)
        count = replay(self.step, (rank, rank + 1), ReplayOutput(at_peak, times, sizes))
        static = sum(self.static[rank])
        return MemoryCurve(
            rank=rank,
            times_s=(0.0, *times[:count].tolist()),
            sizes=(static, *(static + size for size in sizes[:count].tolist())),
        )

    def host_curve(self, rank: int) -> MemoryCurve:
        """Bytes over time that one rank has on the host; at equal times in the order of the row."""
        p = self.layout
        low, high = int(p.offsets[rank]), int(p.offsets[rank + 1])
        kind, stage = p.kind[low:high], p.stage[low:high]
        comes, goes = kind == OFFLOAD_, kind == RELOAD_
        times = np.concatenate((self.state.end[low:high][goes], self.state.start[low:high][comes]))
        sizes = np.concatenate((-self.offloaded[stage[goes]], self.offloaded[stage[comes]]))
        place = np.concatenate((np.flatnonzero(goes), np.flatnonzero(comes)))
        order = np.lexsort((place, times))
        return MemoryCurve(
            rank=rank,
            tier="host",
            times_s=(0.0, *times[order].tolist()),
            sizes=(0, *np.cumsum(sizes[order]).tolist()),
        )


def memory_of(
    program: Program,
    stages: StageGraph,
    costs: Sequence[StageCost],
    layout: ProgramLayout,
    state: SimulatorState,
    *,
    begin_s: Floats,
) -> Memory:
    """What every rank held in a simulation that has run."""
    columns = program.columns
    flow = flow_of(stages)
    begin, finish = byte_changes(columns.kinds, stages, flow, costs, columns.trains)
    ranks = columns.ranks
    into: list[list[int]] = [[] for _ in range(ranks)]
    out: list[list[int]] = [[] for _ in range(ranks)]
    routes = program.message_index(flow).routes
    pairs = {
        channel: program.placement[sender]
        for channel, sender in zip(layout.channel.tolist(), routes.sender.tolist(), strict=True)
        if channel >= 0
    }
    for channel, source in sorted(pairs.items()):
        out[source].append(channel)
        into[int(layout.target[channel])].append(channel)
    changes = MemoryChanges(
        begin=begin,
        finish=finish,
        drops=_forwards_that_drop(program),
        dropped=np.array([cost.recomputed_bytes for cost in costs], np.int64),
        message_bytes=message_bytes(routes, stages),
        begin_s=begin_s,
        first_in=starts_of([len(row) for row in into]),
        channels_in=_joined(into),
        first_out=starts_of([len(row) for row in out]),
        channels_out=_joined(out),
    )
    static = [[0] * len(STATIC_KINDS) for _ in range(ranks)]
    for cost, home in zip(costs, program.placement, strict=True):
        for number, kind in enumerate(STATIC_KINDS):
            static[home][number] += cost.static_bytes.get(kind, 0)
    return Memory(
        layout=layout,
        state=state,
        changes=changes,
        static=static,
        begin_s=begin_s,
        offloaded=np.array([cost.offloaded_bytes for cost in costs], np.int64),
    )


def _forwards_that_drop(program: Program) -> Bools:
    """Which entries are an F whose residuals are in part made again by a RECOMPUTE."""
    if not program.columns.treats_residuals:
        return np.zeros(0, np.bool_)
    drops = np.zeros(len(program.columns), np.bool_)
    forward = program.action_index.of(F_)
    drops[forward[(forward >= 0) & (program.action_index.of(RECOMPUTE_) >= 0)]] = True
    return drops


def _joined(rows: Sequence[Sequence[int]]) -> Longs:
    return np.array([item for row in rows for item in row], np.int64)


def byte_changes(
    kinds: Sequence[Kind], stages: StageGraph, flow: Flow, costs: Sequence[StageCost], training: bool
) -> tuple[Longs, Longs]:
    """Bytes that come when an action begins, and that go (below 0) when it ends, by stage and kind."""
    begin = np.zeros((len(costs), len(kinds), 3), np.int64)
    finish = np.zeros((len(costs), len(kinds), 3), np.int64)
    values = {edge: sum(v.bytes for v in crossing) for edge, crossing in stages.between.items()}
    gradients = {edge: sum(v.bytes for v in stages.gradients(*edge)) for edge in values}
    for s, cost in enumerate(costs):
        inputs = sum(values[p, s] for p in flow.reads_from[s])
        kept = inputs if training and cost.keeps_inputs else 0
        outputs = sum(values[s, r] for r in flow.read_by[s])
        gradients_in = sum(gradients[s, r] for r in flow.gradients_from[s])
        gradients_out = sum(gradients[p, s] for p in flow.gradients_to[s])
        come = {F: outputs, B: gradients_out, I: gradients_out}
        go = {F: kept - inputs, B: -kept - gradients_in, W: -kept - gradients_in}
        for code, kind in enumerate(kinds):
            change, scratch = cost.held_change(kind), cost.transient_bytes.get(kind, 0)
            # What F leaves comes when it begins; what the others free goes when they end.
            begin[s, code] = (change if kind == F and training else 0, come.get(kind, 0), scratch)
            finish[s, code] = (0 if kind == F else change, go.get(kind, 0), -scratch)
            taken, freed = cost.residual_changes(kind)
            if (operation := OPERATIONS.get(kind)) is not None:
                taken, freed = operation.acquired(s), operation.released(s)
            begin[s, code, RESIDUALS] += taken
            finish[s, code, RESIDUALS] -= freed
    return begin, finish


def with_held_sends(memory: Memory, small_bytes: int, caps: Sequence[int] = ()) -> Memory:
    """The same step with messages held until their sender notices that they are through.

    A rank looks after its sends between two actions. A small message is looked at only at the end of the
    step, since that takes longer than it does. Where an action would pass the rank's cap because of that, the
    runtime waits for its sends before it; so the peak is then that of messages that go when they are through.
    small_bytes: messages up to this size are held until the end.  caps: bytes of each rank, or none.
    """
    noticed, sender = _noticed(memory, small_bytes)
    late = replace(memory, gone_s=noticed)
    if not len(caps):
        return late
    over = np.array([sum(peak.values()) > cap for peak, cap in zip(late.peaks(), caps, strict=True)])
    return replace(memory, gone_s=np.where(over[sender], memory.state.transfer_end, noticed))


def _noticed(memory: Memory, small_bytes: int) -> tuple[Floats, np.ndarray]:
    """Of each message when its sender notices that it is through, and who that is."""
    p, s = memory.layout, memory.state
    count = int(p.first_message[-1])
    gone, sender = s.transfer_end[:count].copy(), np.zeros(count, np.int64)
    size = memory.changes.message_bytes[p.route[:count]]
    own_clock = p.stream[p.kind] == 0
    for rank in range(len(p.offsets) - 1):
        low, high = int(p.offsets[rank]), int(p.offsets[rank + 1])
        here = np.arange(low, high)
        sends = here[(p.kind[low:high] == SEND_F_) | (p.kind[low:high] == SEND_B_)]
        ends = np.maximum.accumulate(s.end[low:high][own_clock[low:high]])
        if not len(sends):
            continue
        message = p.message[sends]
        through = s.transfer_end[message]
        at = np.searchsorted(ends, through)
        seen = np.where(at < len(ends), ends[np.minimum(at, len(ends) - 1)], through)
        seen = np.where(through <= s.end[sends], through, seen)
        gone[message] = np.where(size[message] <= small_bytes, max(ends[-1], through.max()), seen)
        sender[message] = rank
    for channel in range(len(p.target)):
        low, high = int(p.first_message[channel]), int(p.first_message[channel + 1])
        gone[low:high] = np.maximum.accumulate(gone[low:high])
    return gone, sender
