"""Requests for links that several share: a heap, served one by one, the earliest first.

Who gets a link depends on who asks first, on whatever rank. A channel requests the two links of its next
message, a lane of a rank the link of its next copy, and a sum over ranks all of its links, from when it could
move or begin. Only when every rank waits or has ended is the earliest request served: all that is requested
later follows from it, so it cannot be for an earlier time.

    rank 0   F  SEND ---.                              link out of node 0
    rank 1   F  F  SEND -+-> heap of (time, entry) -->  |0's message|1's message|
                          served by time, then entry
"""

from __future__ import annotations

from ..ir.columns import RELOAD_, SEND_B_, SEND_F_
from ..ir.heap import pop, push
from ..ir.kernels import kernel
from .loop_state import (
    COPY_IN,
    COPY_LANES,
    COPY_OUT,
    MOVED,
    POSTED,
    SENT,
    ProgramLayout,
    SimulatorState,
    wake,
    wake_all_reduce,
)


@kernel
def request(s: SimulatorState, time: float, entry: int) -> None:
    """Add a request to the heap."""
    push(s.requests.time, s.requests.entry, s.requests.size, time, entry)


@kernel
def mark_pending(s: SimulatorState, number: int) -> None:
    """Remember a channel, or behind all channels a lane of a rank: something has come to it."""
    if not s.requests.is_pending[number]:
        s.requests.is_pending[number] = True
        s.requests.pending[s.requests.size[1]] = number
        s.requests.size[1] += 1


@kernel
def issue_copy(p: ProgramLayout, s: SimulatorState, rank: int, entry: int, clock: float) -> bool:
    """Note that a rank has come to a copy; false if its link is its own."""
    lane = COPY_IN if p.kind[entry] == RELOAD_ else COPY_OUT
    if not len(p.shared.copy_link) or p.shared.copy_link[rank, lane] < 0:
        return False
    s.requests.issued[entry] = clock
    mark_pending(s, len(p.target) + COPY_LANES * rank + lane)
    return True


@kernel
def copy_known(p: ProgramLayout, s: SimulatorState, rank: int, entry: int) -> bool:
    """Whether the copy that an action waits for has its times."""
    needed = p.shared.needs[entry]
    if needed < 0 or s.requests.copied[needed]:
        return True
    s.requests.awaited[rank] = needed
    return False


@kernel
def all_copies_known(s: SimulatorState, rank: int) -> bool:
    """Whether all copies of a rank have their times."""
    if s.requests.head[rank, COPY_OUT] < 0 and s.requests.head[rank, COPY_IN] < 0:
        return True
    s.requests.awaited[rank] = -2
    return False


@kernel
def request_links(p: ProgramLayout, s: SimulatorState) -> None:
    """Let what has come to channels and lanes ask for links, as far as it could move or begin."""
    channels = len(p.target)
    while s.requests.size[1]:
        s.requests.size[1] -= 1
        number = s.requests.pending[s.requests.size[1]]
        s.requests.is_pending[number] = False
        if s.requests.requested[number]:
            continue
        time, entry = 0.0, -1
        if number < channels:
            moved = s.counts[number, MOVED]
            if moved < min(s.counts[number, SENT], s.counts[number, POSTED]):
                message = p.first_message[number] + moved
                time = max(s.transfer_start[message], s.transfer_end[message], s.channel_free[number])
                entry = p.shared.sender[message]
        else:
            rank, lane = divmod(number - channels, COPY_LANES)
            head = s.requests.head[rank, lane]
            if head >= 0 and s.requests.issued[head] >= 0:
                needed = p.shared.needs[head]
                if needed < 0 or s.requests.copied[needed]:
                    free = s.stream_free[rank, p.stream[p.kind[head]]]
                    time = max(s.requests.issued[head], free, s.start[head])
                    entry = head
        if entry >= 0:
            s.requests.requested[number] = True
            request(s, time, entry)


@kernel
def serve_earliest(p: ProgramLayout, s: SimulatorState) -> None:
    """Give the earliest request its links, as soon as they are free."""
    time, entry = s.requests.time[0], s.requests.entry[0]
    pop(s.requests.time, s.requests.entry, s.requests.size)
    if entry >= len(p.kind):
        _serve_sum(p, s, entry - len(p.kind), time)
        return
    code = p.kind[entry]
    if code == SEND_F_ or code == SEND_B_:
        message = p.message[entry]
        route = p.route[message]
        channel = p.channel[route]
        leaves, enters = p.shared.channel_links[channel, 0], p.shared.channel_links[channel, 1]
        begin = max(time, s.requests.link_free[leaves], s.requests.link_free[enters])
        s.requests.link_free[leaves] = s.requests.link_free[enters] = begin + p.shared.message_link_s[route]
        s.transfer_start[message], s.transfer_end[message] = begin, begin + p.seconds[route]
        s.channel_free[channel] = s.transfer_end[message]
        s.counts[channel, MOVED] += 1
        target = p.target[channel]
        if s.awaited[target] == message:
            s.awaited[target] = -1
            wake(s, target)
        s.requests.requested[channel] = False
        mark_pending(s, channel)
    else:
        _serve_copy(p, s, entry, time)


@kernel
def _serve_sum(p: ProgramLayout, s: SimulatorState, number: int, time: float) -> None:
    """Begin a sum as soon as all links that it goes through are free."""
    low, high = p.shared.first_sum_link[number], p.shared.first_sum_link[number + 1]
    begin = time
    for at in range(low, high):
        begin = max(begin, s.requests.link_free[p.shared.sum_links[at]])
    for at in range(low, high):
        s.requests.link_free[p.shared.sum_links[at]] = begin + p.shared.sum_link_s[at]
    s.sum_start[number] = begin
    s.sum_arrived[number] += 1
    wake_all_reduce(s, number)


@kernel
def _serve_copy(p: ProgramLayout, s: SimulatorState, entry: int, time: float) -> None:
    """Copy residuals as soon as the link is free, from when it was asked for."""
    code, stage = p.kind[entry], p.stage[entry]
    rank = p.shared.home[stage]
    lane = COPY_IN if code == RELOAD_ else COPY_OUT
    link = p.shared.copy_link[rank, lane]
    begin = max(time, s.requests.link_free[link])
    s.requests.link_free[link] = begin + p.shared.copy_link_s[stage, lane]
    end = begin + (p.entry_duration[entry] if len(p.entry_duration) else p.duration[stage, code])
    s.start[entry], s.end[entry] = begin, end
    s.stream_free[rank, p.stream[code]] = end
    s.requests.copied[entry] = True
    if p.blocks[entry] >= 0:
        s.start[p.blocks[entry]] = max(s.start[p.blocks[entry]], end)
    s.requests.head[rank, lane] = p.shared.next_copy[entry]
    number = len(p.target) + COPY_LANES * rank
    s.requests.requested[number + lane] = False
    for other in range(COPY_LANES):  # a RELOAD may have waited for this OFFLOAD
        mark_pending(s, number + other)
    if s.requests.awaited[rank] == entry or s.requests.awaited[rank] == -2:
        s.requests.awaited[rank] = -1
        wake(s, rank)
