"""The event loop of the simulator, over columns.

Every rank walks its row with a clock of its own until it must wait. Messages from one rank to another move in
the order of the sender's row, so when one moves is known as soon as its send and its receive are. No global
queue of events is needed: time grows linearly with the program.

Links that several share are the exception: there what could move at once asks for its links, and only when
every rank waits or has ended is the earliest of the requests served (see `shared_links`). First come, first
served, at the link's full rate. Real links give two at a time half the rate each: then the last of them is
through at the same time, and the others are later than here.

    rank 0   |0F0|s|0F1|s|                 |0B0| ...     s: keeps the sender for `occupied` seconds
    channel       |--m0--||--m1--|                       begins when sent, posted and the channel is free
    rank 1          wait  |1F0|  ...                     goes on once m0 has its times

Of the ranks that can go on, the one that was woken last goes first, whatever its clock. Neighbours then hand
over to each other while what they share is still in the processor's cache, and the others collect messages in
the meantime for a long run of their own. In the order of waking, 1F1B would touch every rank for every
micro-batch.

The order in which ranks go first cannot change a time where no link is shared. A channel has one sender and
one receiver, and every time is a maximum and a sum of times of what an entry waits for, in the order of rows:

    begins to move  = max(sent, posted, message before it is through)
    is through      = begins to move + seconds
    RECV ends       = max(its rank comes to it, is through) + occupied
"""

from __future__ import annotations

from ..ir.columns import OFFLOAD_, REDUCE_, RELOAD_, STEP_
from ..ir.kernels import kernel
from .loop_state import (
    COMPUTES,
    FIRST_COPIES,
    MOVED,
    POSTED,
    RECEIVED,
    RECEIVES,
    SENDS,
    SENT,
    STREAMS,
    ProgramLayout,
    SimulatorState,
    posted_ahead,
    sums_end,
    wake,
)
from .shared_links import (
    all_copies_known,
    all_have_come,
    copy_known,
    issue_copy,
    mark_pending,
    request_links,
    serve_earliest,
    sum_uses_shared_links,
)


@kernel
def run(p: ProgramLayout, s: SimulatorState) -> None:
    """Go on until every rank ends or waits, where no link is shared."""
    for channel in range(len(p.target)):
        _post(p, s, channel, posted_ahead(p, channel, 0), s.clock[p.target[channel]])
    _go_on(p, s)


@kernel
def run_sharing(p: ProgramLayout, s: SimulatorState) -> None:
    """The same where links are shared: a kernel of its own, as the other is faster without this."""
    for channel in range(len(p.target)):
        _post(p, s, channel, posted_ahead(p, channel, 0), s.clock[p.target[channel]])
    going = True
    while going:
        _go_on(p, s)
        request_links(p, s)
        going = s.requests.size[0] > 0
        if going:
            serve_earliest(p, s)


@kernel
def _go_on(p: ProgramLayout, s: SimulatorState) -> None:
    """Let all ranks go on until each ends or waits."""
    # Most programs: an action begins where the one before it ended, so that its end is a sum of two numbers.
    at_once = not len(s.start) and not len(p.first_meet) and not len(p.entry_duration)
    while s.runnable_count[0]:
        s.runnable_count[0] -= 1
        rank = s.runnable[s.runnable_count[0]]
        entry, clock, end = s.position[rank], s.clock[rank], p.offsets[rank + 1]
        while entry < end:
            if len(p.step_begins) and p.step_begins[entry] > s.step[rank]:
                _begin_step(p, s, rank, p.step_begins[entry], clock)
            word = p.code[entry]
            # Bits 0 and 1 say what it is; the rest is a place in `flat_duration`, or the route of a message.
            what, number = word & 3, word >> 2
            if what == COMPUTES and at_once:
                clock += p.flat_duration[number]
                s.end[entry] = clock
                entry += 1
                continue
            code = p.kind[entry]
            if what == SENDS:
                channel = p.channel[number]
                message = p.first_message[channel] + s.counts[channel, SENT]
                if len(s.start):
                    s.start[entry] = clock
                s.transfer_start[message] = clock
                s.counts[channel, SENT] += 1
                _move(p, s, channel)
                # The sender goes on: it does not wait until a receive is posted, or the message is through.
                clock += p.occupied[number]
                s.end[entry] = clock
            elif what == RECEIVES:
                channel = p.channel[number]
                message = (
                    p.first_message[channel] + s.counts[channel, RECEIVED] if p.in_order else p.message[entry]
                )
                if not _arrived(p, s, rank, channel, message, clock):
                    break  # here and below: once it is woken, the rank comes to the same entry again
                if len(s.start):
                    s.start[entry] = clock
                clock = max(clock, s.transfer_end[message]) + p.occupied[number]
                s.end[entry] = clock
                s.counts[channel, RECEIVED] += 1
                _post(p, s, channel, posted_ahead(p, channel, s.counts[channel, RECEIVED]), clock)
            elif code == REDUCE_ or code == STEP_:
                closed = _closed(p, s, rank, entry, clock)
                if closed < 0:
                    break
                clock = closed
            elif (code == OFFLOAD_ or code == RELOAD_) and issue_copy(p, s, rank, entry, clock):
                pass  # it asks for its link, and the rank goes on
            else:
                if len(p.shared.copy_link) and not copy_known(p, s, rank, entry):
                    break
                if len(p.first_meet) and not _all_have_come(p, s, rank, entry, clock):
                    break
                clock = _computed(p, s, rank, entry, clock)
            entry += 1
        s.position[rank] = entry
        # A REDUCE that waits has stored its clock, which is behind all that ran beside the rank.
        if entry == end or p.kind[entry] != REDUCE_:
            s.clock[rank] = clock


@kernel
def _closed(p: ProgramLayout, s: SimulatorState, rank: int, entry: int, clock: float) -> float:
    """Run a REDUCE or STEP: the rank's clock behind it, below 0 where it must wait.

    The only one of a program waits for all that runs beside the rank, one of several for operations only:
    there a REDUCE begins its sums, and the STEP of that update waits for them.
    """
    if p.microbatch[entry] >= 0:
        for stream in range(1, FIRST_COPIES):
            clock = max(clock, s.stream_free[rank, stream])
    s.clock[rank] = clock
    if p.microbatch[entry] >= 0:
        return _closed_of_several(p, s, rank, entry, clock)
    if len(p.shared.copy_link) and not all_copies_known(s, rank):
        return -1.0
    for stream in range(1, STREAMS):
        clock = max(clock, s.stream_free[rank, stream])
    if len(s.start) and s.sum_part[rank] == 0:
        s.start[entry] = clock
    if p.kind[entry] == STEP_:
        clock += p.duration[p.stage[entry], STEP_]
    else:
        s.clock[rank] = clock
        if not _run_all_reduces(p, s, rank):
            return -1.0
        clock = s.clock[rank]
    s.end[entry] = clock
    return float(clock)


@kernel
def _closed_of_several(p: ProgramLayout, s: SimulatorState, rank: int, entry: int, clock: float) -> float:
    row = rank * p.updates + p.microbatch[entry]
    low, high = p.first_sum[row], p.first_sum[row + 1]
    begin = clock
    if p.kind[entry] == STEP_:
        summed = _sums_end(p, s, rank, low, high)
        if summed < 0.0:
            return -1.0
        begin = max(clock, summed)
        clock = begin + p.duration[p.stage[entry], STEP_]
    else:
        _begin_sums(p, s, low, high, clock)
    if len(s.start):
        s.start[entry] = begin
    s.end[entry] = clock
    return float(clock)


@kernel
def _computed(p: ProgramLayout, s: SimulatorState, rank: int, entry: int, clock: float) -> float:
    """Run a compute action: the rank's clock behind it."""
    code = p.kind[entry]
    stream = p.stream[code]
    seconds = p.entry_duration[entry] if len(p.entry_duration) else p.duration[p.stage[entry], code]
    begin = clock
    if len(s.start):
        begin = max(begin, s.start[entry])  # not before what holds it has ended
    if len(p.first_meet):
        for m in range(p.first_meet[entry], p.first_meet[entry + 1]):
            begin = max(begin, s.meet_start[p.meets[m]])
    if stream:
        begin = max(begin, s.stream_free[rank, stream])
    end = begin + seconds
    if len(s.start):
        s.start[entry] = begin
    s.end[entry] = end
    # Until an entry runs, its start holds the latest end of what blocks it. All of that stands in front of it
    # in the same row, so that it is known by then; `copy_known` waits where a shared link decides.
    if len(p.blocks) and p.blocks[entry] >= 0:
        s.start[p.blocks[entry]] = max(s.start[p.blocks[entry]], end)
    if stream:
        s.stream_free[rank, stream] = end
        end = clock  # it runs beside the rank, which goes on at once
    return float(end)


@kernel
def _move(p: ProgramLayout, s: SimulatorState, channel: int) -> None:
    """Move what is sent and has a receive posted; wake the receiver if that is what it waits for."""
    if len(p.shared.channel_links) and p.shared.channel_links[channel, 0] >= 0:
        mark_pending(s, channel)
        return
    first, moved, free = p.first_message[channel], s.counts[channel, MOVED], s.channel_free[channel]
    until = min(s.counts[channel, SENT], s.counts[channel, POSTED])
    pace = p.channel_seconds[channel]
    while moved < until:
        message = first + moved
        # Until now its start held when it was sent, and its end when its receive was posted.
        begin = max(s.transfer_start[message], s.transfer_end[message], free)
        free = begin + (pace if pace >= 0 else p.seconds[p.route[message]])
        s.transfer_start[message] = begin
        s.transfer_end[message] = free
        moved += 1
    s.channel_free[channel] = free
    s.counts[channel, MOVED] = moved
    target = p.target[channel]
    awaited = s.awaited[target]
    if first <= awaited < first + moved:
        s.awaited[target] = -1
        wake(s, target)


@kernel
def _post(p: ProgramLayout, s: SimulatorState, channel: int, count: int, clock: float) -> None:
    """Post receives until `count` of a channel's messages have one."""
    first, posted = p.first_message[channel], s.counts[channel, POSTED]
    until = min(count, p.due[channel, s.step[p.target[channel]]])
    while posted < until:
        s.transfer_end[first + posted] = clock
        posted += 1
    s.counts[channel, POSTED] = posted
    _move(p, s, channel)


@kernel
def _begin_step(p: ProgramLayout, s: SimulatorState, rank: int, step: int, clock: float) -> None:
    """Post the first receives of a step."""
    s.step[rank] = step
    for channel in range(len(p.target)):
        if p.target[channel] == rank:
            _post(p, s, channel, posted_ahead(p, channel, s.counts[channel, RECEIVED]), clock)


@kernel
def _arrived(
    p: ProgramLayout, s: SimulatorState, rank: int, channel: int, message: int, clock: float
) -> bool:
    """Whether it is known when a message arrives. All receives up to it are posted, whatever the order of
    waiting."""
    place = message - p.first_message[channel]
    if s.counts[channel, POSTED] <= place:
        _post(p, s, channel, place + 1, clock)
    if s.counts[channel, MOVED] > place:
        return True
    s.awaited[rank] = message
    return False


@kernel
def _all_have_come(p: ProgramLayout, s: SimulatorState, rank: int, entry: int, clock: float) -> bool:
    """Whether all have come that begin together with an entry."""
    low, high = p.first_meet[entry], p.first_meet[entry + 1]
    if low < high and s.meet_start[entry] < 0:
        # Not before what holds it has ended, nor what is in front of it on its own stream.
        s.meet_start[entry] = max(clock, s.start[entry], s.stream_free[rank, p.stream[p.kind[entry]]])
        # A rank waits for one thing at a time, so one `next_waiter` per rank makes the lists of all things.
        waiter = s.meet_waiter[entry]
        while waiter >= 0:
            wake(s, waiter)
            waiter = s.next_waiter[waiter]
    for m in range(low, high):
        other = p.meets[m]
        if s.meet_start[other] < 0:
            s.next_waiter[rank] = s.meet_waiter[other]
            s.meet_waiter[other] = rank
            return False
    return True


@kernel
def _run_all_reduces(p: ProgramLayout, s: SimulatorState, rank: int) -> bool:
    """Begin a rank's sums, and wait for them. `part` is 1 where the rank waits."""
    low, high = p.first_sum[rank], p.first_sum[rank + 1]
    if s.sum_part[rank] == 0:
        s.sum_part[rank] = 1
        _begin_sums(p, s, low, high, s.clock[rank])
    end = _sums_end(p, s, rank, low, high)
    if end < 0.0:
        return False
    s.clock[rank] = max(s.clock[rank], end)
    s.sum_part[rank] = 0
    return True


@kernel
def _begin_sums(p: ProgramLayout, s: SimulatorState, low: int, high: int, clock: float) -> None:
    """A rank comes to its sums. Each starts when the last of its ranks has come; where it goes through shared
    links, when it is served, and is then counted as one more that has come."""
    for at in range(low, high):
        number = p.sums[at]
        s.sum_start[number] = max(s.sum_start[number], clock)
        s.sum_arrived[number] += 1
        if s.sum_arrived[number] == p.sum_arrivals[number]:
            all_have_come(p, s, number)


@kernel
def _sums_end(p: ProgramLayout, s: SimulatorState, rank: int, low: int, high: int) -> float:
    """When a rank has its sums, below 0 where it must wait for others to come."""
    for at in range(low, high):
        number = p.sums[at]
        # A sum over shared links counts one arrival more: that it was served.
        if s.sum_arrived[number] < p.sum_arrivals[number] + sum_uses_shared_links(p, number):
            s.next_waiter[rank] = s.sum_waiter[number]
            s.sum_waiter[number] = rank
            return -1.0
    return sums_end(p, s, low, high)
