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

Changes of one rank come from two sources, each in the order of time:

    its own row          |+F|+RECV buffer|-B|...     what begins comes, what ends goes
    its sent messages       |-m0|    |-m1|           when they are through

At equal times messages that are through go first, then the rank's own order decides: what ends goes before
what begins comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..ir.action import B, F, I, Kind, W
from ..ir.columns import (
    F_,
    OFFLOAD_,
    RECOMPUTE_,
    RECV_B_,
    RECV_F_,
    RELOAD_,
    SEND_B_,
    SEND_F_,
    Bools,
    Floats,
    Ints,
    Longs,
    starts_of,
)
from ..ir.costs import MEMORY_KINDS, STATIC_KINDS, StageCost
from ..ir.flow import Flow, flow_of
from ..ir.kernels import kernel
from ..ir.operation import OPERATIONS
from ..ir.schedule import Program
from ..ir.stages import StageGraph
from ..ir.timeline import MemoryCurve
from .layout import message_bytes
from .loop_state import ProgramLayout, SimulatorState, posted_ahead

RESIDUALS, BOUNDARY, TRANSIENT, MOST_RESIDUALS = 0, 1, 2, 3


class MemoryChanges(NamedTuple):
    """What changes memory, in bytes; when follows from the times of a simulation."""

    begin: Longs
    """(stages, kinds, 3): residuals, boundary and transient bytes that come when an action begins."""
    finish: Longs
    """(stages, kinds, 3): the change when it ends, below 0 for what goes."""
    drops: Bools
    """(entries,): whether it is an F that keeps `dropped[stage]` bytes less, as a RECOMPUTE makes them again;
    empty where there is none."""
    dropped: Longs
    """(stages,)"""
    message_bytes: Longs
    """(routes,)"""
    first_in: Ints
    """(ranks + 1,): the channels to rank r are `channels_in[first_in[r] : first_in[r + 1]]`."""
    channels_in: Longs
    first_out: Ints
    channels_out: Longs


class Step(NamedTuple):
    """A simulated step: what ran, when, and what that changes.

    gone_s, gone_route: when senders let go of messages, and of what route; channel by channel as the
    messages are, but in the order of time.
    """

    layout: ProgramLayout
    state: SimulatorState
    changes: MemoryChanges
    gone_s: Floats
    gone_route: Ints


class ReplayOutput(NamedTuple):
    """at_peak: (ranks, 4), the bytes at each rank's first peak, and the most residuals at any time.  time,
    size: the curve, without what is static; empty where it is not asked for."""

    at_peak: Longs
    time: Floats
    size: Longs


class RowChanges(NamedTuple):
    """The changes by a rank's own row, in its order.

    time: (changes,), seconds.  change: (changes, 3), bytes.
    posted, received: (channels,), messages so far."""

    time: Floats
    change: Longs
    posted: Longs
    received: Longs


def replay(step: Step, ranks: tuple[int, int], out: ReplayOutput) -> int:
    """Go through the changes of some ranks; fills `out`. Returns how many the last rank has."""
    p = step.layout
    most = 2 * int(np.diff(p.offsets[ranks[0] : ranks[1] + 1]).max(initial=0)) + 1
    posted, received, gone = np.zeros((3, len(p.target)), np.int64)
    row = RowChanges(np.zeros(most), np.zeros((most, 3), np.int64), posted, received)
    count, order = 0, np.zeros(0, np.int64)
    for rank in range(ranks[0], ranks[1]):
        time = row.time[: int(_row_changes(step, rank, row))]
        if len(step.state.start):  # else each entry starts when the one before it ends: they are in order
            order = np.argsort(time, kind="stable")
        count = int(_add_up(step, rank, (time, row.change, order), gone, out))
    return count


@kernel
def _row_changes(step: Step, rank: int, row: RowChanges) -> int:
    """Note the changes by a rank's own row: how many there are."""
    p, s, changes = step.layout, step.state, step.changes
    count, begin = 0, 0.0
    clock, number = begin, 0  # when the rank comes to an entry, and in which of its steps that is
    for at in range(changes.first_in[rank], changes.first_in[rank + 1]):
        channel = changes.channels_in[at]
        goal = channel, posted_ahead(p, channel, 0), number
        count = _note_buffers(step, goal, begin, row, count)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code, end = p.kind[entry], s.end[entry]
        if len(p.step_begins) and p.step_begins[entry]:
            number = p.step_begins[entry]
            for at in range(changes.first_in[rank], changes.first_in[rank + 1]):
                channel = changes.channels_in[at]
                goal = channel, posted_ahead(p, channel, row.received[channel]), number
                count = _note_buffers(step, goal, clock, row, count)
        if len(s.start):
            begin = s.start[entry]
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            channel = p.channel[p.route[message]]
            upto = message - p.first_message[channel] + 1
            count = _note_buffers(step, (channel, upto, number), begin, row, count)
            row.received[channel] += 1
            goal = channel, posted_ahead(p, channel, row.received[channel]), number
            count = _note_buffers(step, goal, end, row, count)
        elif code != SEND_F_ and code != SEND_B_:
            stage = p.stage[entry]
            before = count
            count += _note_change((changes.begin, stage, code), begin, row, count)
            if count > before and len(changes.drops) and changes.drops[entry]:
                row.change[before, RESIDUALS] -= changes.dropped[stage]
            count += _note_change((changes.finish, stage, code), end, row, count)
        begin = end
        if p.stream[code] == 0:
            clock = end
    return count


@kernel
def _note_change(change: tuple[Longs, int, int], time: float, row: RowChanges, count: int) -> int:
    """Note a change of a (table, stage, kind) as number `count`: 1, or 0 if it is none."""
    table, stage, code = change
    some = False
    for part in range(3):
        row.change[count, part] = table[stage, code, part]
        some = some or table[stage, code, part] != 0
    row.time[count] = time
    return 1 if some else 0


@kernel
def _note_buffers(step: Step, goal: tuple[int, int, int], time: float, row: RowChanges, count: int) -> int:
    """A buffer for each receive that is posted; goal: a channel, how many messages then have one, and in
    which of its steps the rank is."""
    p, changes = step.layout, step.changes
    channel, upto, number = goal
    until = min(upto, p.due[channel, number])
    while row.posted[channel] < until:
        row.time[count] = time
        row.change[count, RESIDUALS] = 0
        row.change[count, TRANSIENT] = 0
        route = p.route[p.first_message[channel] + row.posted[channel]]
        row.change[count, BOUNDARY] = changes.message_bytes[route]
        row.posted[channel] += 1
        count += 1
    return count


@kernel
def _next_sent(step: Step, rank: int, gone: Longs) -> int:
    """The channel of which a rank lets go of a message next, -1 for none; of several the first.

    gone: of each channel, the messages before that."""
    p, changes = step.layout, step.changes
    best, first = -1, np.inf
    for at in range(changes.first_out[rank], changes.first_out[rank + 1]):
        channel = changes.channels_out[at]
        message = p.first_message[channel] + gone[channel]
        if message < p.first_message[channel + 1] and (best < 0 or step.gone_s[message] < first):
            best, first = channel, step.gone_s[message]
    return int(best)


@kernel
def _add_up(step: Step, rank: int, own: tuple[Floats, Longs, Longs], gone: Longs, out: ReplayOutput) -> int:
    """Merge both sources of a rank by time, and add them up: how many changes there are.

    own: times and bytes of its row's changes, and their order by time; empty if they are in order.
    """
    p = step.layout
    time, change, order = own
    at_own, channel, message = 0, _next_sent(step, rank, gone), 0
    residuals, boundary, transient, peak, count = 0, 0, 0, 0, 0
    while at_own < len(time) or channel >= 0:
        entry = at_own
        if len(order) and at_own < len(order):
            entry = order[at_own]
        if channel >= 0:
            message = p.first_message[channel] + gone[channel]
        # `<=`: else a peak would count a message together with what begins just when it is through.
        if channel >= 0 and (at_own == len(time) or step.gone_s[message] <= time[entry]):
            now = step.gone_s[message]
            boundary -= step.changes.message_bytes[step.gone_route[message]]
            gone[channel] += 1
            channel = _next_sent(step, rank, gone)
        else:
            now = time[entry]
            residuals += change[entry, RESIDUALS]
            boundary += change[entry, BOUNDARY]
            transient += change[entry, TRANSIENT]
            at_own += 1
        total = residuals + boundary + transient
        if residuals > out.at_peak[rank, MOST_RESIDUALS]:
            out.at_peak[rank, MOST_RESIDUALS] = residuals
        if total > peak:
            peak = total
            out.at_peak[rank, RESIDUALS] = residuals
            out.at_peak[rank, BOUNDARY] = boundary
            out.at_peak[rank, TRANSIENT] = transient
        if len(out.time):
            out.time[count] = now
            out.size[count] = total
        count += 1
    return count


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """What every rank held in a simulation that has run. Curves are made when they are asked for."""

    layout: ProgramLayout
    state: SimulatorState
    changes: MemoryChanges
    static: Sequence[Sequence[int]]
    offloaded: Longs
    """Bytes that OFFLOAD copies, by stage."""
    gone_s: Floats | None = None
    """When each message's sender lets go of it; None for when it is through."""

    @cached_property
    def step(self) -> Step:
        """What is replayed. A small message is held to the end of a step, and larger ones of its channel,
        sent later, are not."""
        p = self.layout
        gone_s, gone_route = self.state.transfer_end, p.route
        if self.gone_s is not None:
            order = np.lexsort((self.gone_s, np.repeat(np.arange(len(p.target)), np.diff(p.first_message))))
            gone_s, gone_route = self.gone_s[order], p.route[order]
        return Step(p, self.state, self.changes, gone_s, gone_route)

    def peaks(self) -> tuple[Mapping[str, int], ...]:
        """Per rank the bytes by kind at its first peak."""
        return tuple(
            dict(zip(MEMORY_KINDS, (*static, *own), strict=True))
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
        out = self.changes.channels_out[slice(*self.changes.first_out[rank : rank + 2])]
        most += int(np.diff(p.first_message)[out].sum())
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
) -> Memory:
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

    A rank looks after its sends between two actions. A small message is looked at only at the end of a step,
    of which a program of several updates has as many, since that takes longer than it does. Where an action
    would pass the rank's cap because of that, the runtime waits for its sends before it; so the peak is then
    that of messages that go when they are through.
    small_bytes: messages up to this size are held until a step's end.  caps: bytes of each rank, or none.
    """
    noticed, sender = _noticed(memory, small_bytes)
    late = replace(memory, gone_s=noticed)
    if not len(caps):
        return late
    over = np.array([sum(peak.values()) > cap for peak, cap in zip(late.peaks(), caps, strict=True)])
    return replace(memory, gone_s=np.where(over[sender], memory.state.transfer_end, noticed))


def _first_from(times: Floats, ends: Floats) -> Floats:
    """For each time the first of ascending ends that is not before it; the time itself if there is none."""
    at = np.searchsorted(ends, times)
    return np.where(at < len(ends), ends[np.minimum(at, len(ends) - 1)], times)


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
        # The rank looks between two actions: at the first of their ends from when the message is through.
        #
        #     rank      |  0F0  |s|   0F1   |   0F2   |
        #     message             |---m0---|                through
        #     noticed                       ^               the end of 0F1
        #
        # What is through while its own SEND runs is noticed there.
        clock = np.maximum.accumulate(np.where(own_clock[low:high], s.end[low:high], 0.0))
        ends = clock[own_clock[low:high]]
        if not len(sends):
            continue
        message = p.message[sends]
        through = s.transfer_end[message]
        seen = np.where(through <= s.end[sends], through, _first_from(through, ends))
        begun = np.flatnonzero(p.step_begins[low:high])
        step_ends = np.append(clock[begun - 1], max(ends[-1], through.max()))
        late = np.maximum(seen, _first_from(s.end[sends], step_ends))
        gone[message] = np.where(size[message] <= small_bytes, late, seen)
        sender[message] = rank
    return gone, sender
