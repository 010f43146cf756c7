"""Replay: what each rank held, from the times of a simulation that has run.

Changes of one rank come from two sources, each in the order of time:

    its own row          |+F|+RECV buffer|-B|...     what begins comes, what ends goes
    its sent messages       |-m0|    |-m1|           when they are through

At equal times messages that are through go first, then the rank's own order decides: what ends goes before
what begins comes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..ir.columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Bools, Floats, Ints, Longs
from ..ir.kernels import kernel
from .loop_state import ProgramLayout, SimulatorState

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
    begin_s: Floats
    """(ranks,): when each starts, in seconds."""
    first_in: Ints
    """(ranks + 1,): the channels to rank r are `channels_in[first_in[r] : first_in[r + 1]]`."""
    channels_in: Longs
    first_out: Ints
    channels_out: Longs

    def outgoing(self, rank: int) -> Longs:
        return self.channels_out[self.first_out[rank] : self.first_out[rank + 1]]


class Step(NamedTuple):
    """A simulated step: what ran, when, and what that changes."""

    layout: ProgramLayout
    state: SimulatorState
    changes: MemoryChanges


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
    posted, received = np.zeros((2, len(p.target)), np.int64)
    row = RowChanges(np.zeros(most), np.zeros((most, 3), np.int64), posted, received)
    count = 0
    for rank in range(ranks[0], ranks[1]):
        own = int(_row_changes(step, rank, row))
        time = row.time[:own]
        # Where every entry starts when the one before it ends, rows are in the order of time already.
        order = np.argsort(time, kind="stable") if len(step.state.start) else np.arange(own)
        count = int(_add_up((time, row.change, order), _sent_messages(step, rank), rank, out))
    return count


def _sent_messages(step: Step, rank: int) -> tuple[Floats, Longs]:
    """When each message of a rank is through, and its bytes, by time; at equal times by channel."""
    p, s, b = step
    bounds = [p.first_message[channel : channel + 2].tolist() for channel in b.outgoing(rank).tolist()]
    times = [s.transfer_end[low:high] for low, high in bounds]
    sizes = [b.message_bytes[p.route[low:high]] for low, high in bounds]
    if len(bounds) == 1:
        return times[0], sizes[0]
    time = np.concatenate([*times, np.zeros(0)])
    order = np.argsort(time, kind="stable")
    return time[order], np.concatenate([*sizes, np.zeros(0, np.int64)])[order]


@kernel
def _row_changes(step: Step, rank: int, row: RowChanges) -> int:
    """Note the changes by a rank's own row: how many there are."""
    p, s, b = step
    count, begin = 0, b.begin_s[rank]
    for at in range(b.first_in[rank], b.first_in[rank + 1]):
        count = _note_buffers(step, (b.channels_in[at], p.receive_ahead), begin, row, count)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code, end = p.kind[entry], s.end[entry]
        if len(s.start):
            begin = s.start[entry]
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            channel = p.channel[p.route[message]]
            upto = message - p.first_message[channel] + 1
            count = _note_buffers(step, (channel, upto), begin, row, count)
            row.received[channel] += 1
            count = _note_buffers(step, (channel, row.received[channel] + p.receive_ahead), end, row, count)
        elif code != SEND_F_ and code != SEND_B_:
            stage = p.stage[entry]
            before = count
            count += _note_change((b.begin, stage, code), begin, row, count)
            if count > before and len(b.drops) and b.drops[entry]:
                row.change[before, RESIDUALS] -= b.dropped[stage]
            count += _note_change((b.finish, stage, code), end, row, count)
        begin = end
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
def _note_buffers(step: Step, goal: tuple[int, int], time: float, row: RowChanges, count: int) -> int:
    """A buffer for each receive that is posted; goal: a channel, and how many messages then have one."""
    p, _, b = step
    channel, upto = goal
    until = min(upto, p.first_message[channel + 1] - p.first_message[channel])
    while row.posted[channel] < until:
        row.time[count] = time
        row.change[count, RESIDUALS] = 0
        row.change[count, TRANSIENT] = 0
        route = p.route[p.first_message[channel] + row.posted[channel]]
        row.change[count, BOUNDARY] = b.message_bytes[route]
        row.posted[channel] += 1
        count += 1
    return count


@kernel
def _add_up(
    own: tuple[Floats, Longs, Longs], sent: tuple[Floats, Longs], rank: int, out: ReplayOutput
) -> int:
    """Merge both sources of a rank by time, and add them up: how many changes there are.

    own: times and bytes of its row's changes, and their order by time.  sent: when its messages are through,
    and their bytes.
    """
    time, change, order = own
    gone_at, gone_size = sent
    at_own, at_gone = 0, 0
    residuals, boundary, transient, peak, count = 0, 0, 0, 0, 0
    while at_own < len(order) or at_gone < len(gone_at):
        own_time = time[order[at_own]] if at_own < len(order) else np.inf
        gone_time = gone_at[at_gone] if at_gone < len(gone_at) else np.inf
        if gone_time <= own_time:
            now = gone_time
            boundary -= gone_size[at_gone]
            at_gone += 1
        else:
            now = own_time
            entry = order[at_own]
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
