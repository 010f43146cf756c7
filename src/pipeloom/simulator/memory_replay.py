"""Replay: what each rank held, from the times of a simulation that has run.

Changes of one rank come from two sources, each in the order of time:

    its own row          |+F|+RECV buffer|-B|...     what begins comes, what ends goes
    its sent messages       |-m0|    |-m1|           when they are through

At equal times messages that are through go first, then the rank's own order decides: what ends goes before
what begins comes.

Where every entry starts when the one before it ends, rows are in the order of time, and one pass does all
(`_in_order`); else the changes of a row are noted, sorted by time, and merged with the others (`_merged`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..ir.columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Longs
from ..ir.kernels import allocating, kernel
from .loop_state import Floats, ProgramLayout, SimulatorState
from .memory_changes import MemoryChanges

RESIDUALS, BOUNDARY, TRANSIENT, MOST_RESIDUALS = 0, 1, 2, 3


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


class Pass(NamedTuple):
    """Where one pass over rows stands, all zero before the first."""

    counts: Longs
    """(3, channels): messages posted, received and gone."""
    sums: Longs
    """(6,): bytes of each of three kinds, the most of all together, the number of changes, and the channel of
    the message that is through next."""
    next_gone: Floats
    """(1,): when that is."""


class RowChanges(NamedTuple):
    """The changes by a rank's own row, in its order.

    time: (changes,), seconds.  change: (changes, 3), bytes.
    posted, received: (channels,), messages so far."""

    time: Floats
    change: Longs
    posted: Longs
    received: Longs


_POSTED, _RECEIVED, _GONE = 0, 1, 2
_PEAK, _COUNT, _NEXT = 3, 4, 5


def replay(step: Step, ranks: tuple[int, int], out: ReplayOutput) -> int:
    """Go through the changes of some ranks; fills `out`. Returns how many the last rank has."""
    p = step.layout
    if not len(step.state.start):
        work = Pass(np.zeros((3, len(p.target)), np.int64), np.zeros(6, np.int64), np.zeros(1))
        _in_order(step, ranks, work, out)
        return int(work.sums[_COUNT])
    most = 2 * int(np.diff(p.offsets[ranks[0] : ranks[1] + 1]).max(initial=0)) + 1
    posted, received = np.zeros((2, len(p.target)), np.int64)
    row = RowChanges(np.zeros(most), np.zeros((most, 3), np.int64), posted, received)
    count = 0
    for rank in range(ranks[0], ranks[1]):
        own = _row_changes(step, rank, row)
        order = np.argsort(row.time[:own], kind="stable")  # in a kernel it takes 2 s to compile
        count = _merged(step, rank, row, order, out)
    return count


@kernel
def _in_order(step: Step, ranks: tuple[int, int], work: Pass, out: ReplayOutput) -> None:
    """All changes of some ranks in one pass: their rows are in the order of time."""
    for rank in range(ranks[0], ranks[1]):
        _row_in_order(step, rank, work, out)


@kernel
def _row_in_order(step: Step, rank: int, work: Pass, out: ReplayOutput) -> None:
    p, s, b = step
    for number in range(len(work.sums)):
        work.sums[number] = 0
    _find_gone(step, rank, work)
    clock = b.begin_s[rank]
    for at in range(b.first_in[rank], b.first_in[rank + 1]):
        _post_buffers(step, rank, (b.channels_in[at], p.receive_ahead), clock, work, out)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code, end = p.kind[entry], s.end[entry]
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            channel = p.channel[p.route[message]]
            work.counts[_RECEIVED, channel] += 1
            _post_buffers(step, rank, (channel, message - p.first_message[channel] + 1), clock, work, out)
            _post_buffers(
                step, rank, (channel, work.counts[_RECEIVED, channel] + p.receive_ahead), end, work, out
            )
        elif code != SEND_F_ and code != SEND_B_:
            stage = p.stage[entry]
            _add_up(step, rank, (b.begin, stage, code), clock, work, out)
            _add_up(step, rank, (b.finish, stage, code), end, work, out)
        clock = end
    _let_go(step, rank, np.inf, work, out)


@kernel
def _post_buffers(
    step: Step, rank: int, goal: tuple[int, int], time: float, work: Pass, out: ReplayOutput
) -> None:
    """A buffer for each receive that is posted; goal: a channel, and how many messages then have one."""
    p, _, b = step
    channel, upto = goal
    until = min(upto, p.first_message[channel + 1] - p.first_message[channel])
    while work.counts[_POSTED, channel] < until:
        _let_go(step, rank, time, work, out)
        size = b.message_bytes[p.route[p.first_message[channel] + work.counts[_POSTED, channel]]]
        work.counts[_POSTED, channel] += 1
        work.sums[BOUNDARY] += size
        _note(rank, time, work, out)


@kernel
def _add_up(
    step: Step, rank: int, change: tuple[Longs, int, int], time: float, work: Pass, out: ReplayOutput
) -> None:
    """A change of a rank's own row, if it is any; change: a table, and the stage and kind in it."""
    table, stage, code = change
    residuals, boundary = table[stage, code, RESIDUALS], table[stage, code, BOUNDARY]
    transient = table[stage, code, TRANSIENT]
    if residuals or boundary or transient:
        _let_go(step, rank, time, work, out)
        work.sums[RESIDUALS] += residuals
        work.sums[BOUNDARY] += boundary
        work.sums[TRANSIENT] += transient
        _note(rank, time, work, out)


@kernel
def _let_go(step: Step, rank: int, time: float, work: Pass, out: ReplayOutput) -> None:
    """Messages of a rank that are through by `time`."""
    p, s, b = step
    while work.next_gone[0] <= time:
        channel = work.sums[_NEXT]
        if channel < 0:
            break
        work.sums[BOUNDARY] -= b.message_bytes[
            p.route[p.first_message[channel] + work.counts[_GONE, channel]]
        ]
        work.counts[_GONE, channel] += 1
        _note(rank, work.next_gone[0], work, out)
        _find_gone(step, rank, work)


@kernel
def _find_gone(step: Step, rank: int, work: Pass) -> None:
    """The message of a rank that is through next; of several at the same time, that of the first channel."""
    p, s, b = step
    work.next_gone[0] = np.inf
    work.sums[_NEXT] = -1
    for at in range(b.first_out[rank], b.first_out[rank + 1]):
        channel = b.channels_out[at]
        message = p.first_message[channel] + work.counts[_GONE, channel]
        if message < p.first_message[channel + 1] and (
            work.sums[_NEXT] < 0 or s.transfer_end[message] < work.next_gone[0]
        ):
            work.next_gone[0] = s.transfer_end[message]
            work.sums[_NEXT] = channel


@kernel
def _note(rank: int, time: float, work: Pass, out: ReplayOutput) -> None:
    """Keep a rank's first peak, and the curve where it is asked for."""
    total = work.sums[RESIDUALS] + work.sums[BOUNDARY] + work.sums[TRANSIENT]
    if work.sums[RESIDUALS] > out.at_peak[rank, MOST_RESIDUALS]:
        out.at_peak[rank, MOST_RESIDUALS] = work.sums[RESIDUALS]
    if total > work.sums[_PEAK]:
        work.sums[_PEAK] = total
        for part in range(3):
            out.at_peak[rank, part] = work.sums[part]
    if len(out.time):
        out.time[work.sums[_COUNT]] = time
        out.size[work.sums[_COUNT]] = total
    work.sums[_COUNT] += 1


@kernel
def _row_changes(step: Step, rank: int, row: RowChanges) -> int:
    """Note the changes by a rank's own row: how many there are."""
    p, s, b = step
    count = 0
    for at in range(b.first_in[rank], b.first_in[rank + 1]):
        count = _note_buffers(step, (b.channels_in[at], p.receive_ahead), b.begin_s[rank], row, count)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code = p.kind[entry]
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            channel = p.channel[p.route[message]]
            upto = message - p.first_message[channel] + 1
            count = _note_buffers(step, (channel, upto), s.start[entry], row, count)
            row.received[channel] += 1
            upto = row.received[channel] + p.receive_ahead
            count = _note_buffers(step, (channel, upto), s.end[entry], row, count)
        elif code != SEND_F_ and code != SEND_B_:
            stage = p.stage[entry]
            before = count
            count += _note_change((b.begin, stage, code), s.start[entry], row, count)
            if count > before and len(b.drops) and b.drops[entry]:
                row.change[before, RESIDUALS] -= b.dropped[stage]
            count += _note_change((b.finish, stage, code), s.end[entry], row, count)
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


@allocating
def sent_messages(step: Step, rank: int) -> tuple[Floats, Longs]:
    """When each message of a rank is through, and its bytes, by time: channels merged in pairs."""
    p, s, b = step
    low, high = b.first_out[rank], b.first_out[rank + 1]
    total = 0
    for at in range(low, high):
        total += p.first_message[b.channels_out[at] + 1] - p.first_message[b.channels_out[at]]
    times, sizes, place = np.empty(total), np.empty(total, np.int64), 0
    for at in range(low, high):
        channel = b.channels_out[at]
        for message in range(p.first_message[channel], p.first_message[channel + 1]):
            times[place] = s.transfer_end[message]
            sizes[place] = b.message_bytes[p.route[message]]
            place += 1
    width = 1
    bounds = np.zeros(high - low + 1, np.int64)
    for at in range(low, high):
        channel = b.channels_out[at]
        bounds[at - low + 1] = bounds[at - low] + p.first_message[channel + 1] - p.first_message[channel]
    while width < high - low:
        for run in range(0, high - low - width, 2 * width):
            last = min(run + 2 * width, high - low)
            _merge(times, sizes, bounds[run], bounds[run + width], bounds[last])
        width *= 2
    return times, sizes


@allocating
def _merge(times: Floats, sizes: Longs, low: int, middle: int, high: int) -> None:
    """Merge two neighbouring sorted parts."""
    left_times, left_sizes = times[low:middle].copy(), sizes[low:middle].copy()
    a, c = 0, middle
    for to in range(low, high):
        if a < middle - low and (c >= high or left_times[a] <= times[c]):
            times[to] = left_times[a]
            sizes[to] = left_sizes[a]
            a += 1
        else:
            times[to] = times[c]
            sizes[to] = sizes[c]
            c += 1


@allocating
def _merged(step: Step, rank: int, row: RowChanges, order: Longs, out: ReplayOutput) -> int:
    """Add up all changes of a rank in the order of time: how many; order: that of its own row's."""
    return int(_add_sources((row.time, row.change, order), sent_messages(step, rank), step, rank, out))


@kernel
def _add_sources(
    own: tuple[Floats, Longs, Longs], sent: tuple[Floats, Longs], step: Step, rank: int, out: ReplayOutput
) -> int:
    """Merge both sources of a rank by time, and add them up.

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
