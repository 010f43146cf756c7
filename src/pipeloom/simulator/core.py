"""The event loop of the simulator, over columns.

Every rank walks its row with a clock of its own until it must wait. Messages from one rank to another move in
the order of the sender's row, so when one moves is known as soon as its send and its receive are. No global
queue of events is needed: time grows linearly with the program.

Of the ranks that can go on, the one that was woken last goes first, whatever its clock. Neighbours then hand
over to each other while what they share is still in the processor's cache, and the others collect messages in
the meantime for a long run of their own. In the order of waking, 1F1B would touch every rank for every
micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ir.columns import RECV_B_, RECV_F_, REDUCE_, SEND_B_, SEND_F_, STEP_, Codes, Ints, Longs
from ..ir.kernels import in_place, kernel

Floats = NDArray[np.float64]


class Layout(NamedTuple):
    """What runs. Entries are those of the program's columns; messages are numbered pipe by pipe, in the order
    sent; a pipe leads from one rank to another. Empty arrays where a program has nothing of a kind.

    message: per entry, -1 for no transfer.  line: per message.  pipe, seconds, busy: per line: time that a
    message takes, and for which it keeps its sender.  first: of each pipe's messages, and their number.
    duration: by (stage, kind); own_duration: per entry, where some differ from that.  stream: by kind, 0
    computes, others run beside.  held: per entry the entry that cannot begin before it ends, or -1.
    first_meet, meets: entries that begin together with an entry.
    first_sum, sums: sums of each rank's REDUCE in order; by sum how many ranks meet, and how long it takes.
    """

    kind: Codes
    stage: Ints
    offsets: Longs
    message: Ints
    line: Ints
    pipe: Ints
    seconds: Floats
    busy: Floats
    first: Longs
    target: Ints
    duration: Floats
    own_duration: Floats
    stream: Ints
    held: Ints
    first_meet: Ints
    meets: Ints
    first_sum: Ints
    sums: Ints
    sum_ranks: Ints
    sum_seconds: Floats
    ahead: int


class State(NamedTuple):
    """What changes.

    start, end: per entry; start may be empty, see `new_state`.
    move_start, move_end: per message; before it moves, when it was sent and when its receive was posted.
    at, clock, awaited, part, behind, streams: per rank: where it stands, its clock, the message that it waits
        for, the part of its REDUCE that it is in, who waits behind it for the same thing, when its streams
        are free.
    counts, free: per pipe: messages sent, posted, moved and received; when it is free.
    stack, ready: ranks that can go on, and how many they are.
    """

    start: Floats
    end: Floats
    move_start: Floats
    move_end: Floats
    at: Longs
    clock: Floats
    awaited: Longs
    part: Longs
    behind: Longs
    streams: Floats
    counts: Longs
    free: Floats
    sum_at: Floats
    sum_here: Longs
    sum_waiter: Longs
    meet_at: Floats
    meet_waiter: Longs
    stack: Longs
    ready: Longs


STREAMS = 5
"""Computing, and those that run beside it."""
_SENT, _POSTED, _MOVED, _RECEIVED = 0, 1, 2, 3
_NOT_YET = -1.0


def new_state(layout: Layout, begin_s: Floats, *, starts: bool = True) -> State:
    """Everything before the first event.

    begin_s: when each rank starts.  starts: whether to note when entries start. Where nothing meets others or
    runs beside computing, each starts when the one before it in its row ends, so that need not be stored.
    """
    entries, ranks, pipes = len(layout.kind), len(begin_s), len(layout.target)
    sums, meeting = len(layout.sum_ranks), len(layout.first_meet)
    return State(
        start=np.zeros(entries if starts else 0), end=np.zeros(entries),
        move_start=np.zeros(len(layout.line)), move_end=np.zeros(len(layout.line)),
        at=layout.offsets[:-1].copy(), clock=begin_s.astype(np.float64), awaited=np.full(ranks, -1),
        part=np.zeros(ranks, np.int64), behind=np.full(ranks, -1), streams=np.zeros((ranks, STREAMS)),
        counts=np.zeros((pipes, 4), np.int64), free=np.zeros(pipes),
        sum_at=np.zeros(sums), sum_here=np.zeros(sums, np.int64), sum_waiter=np.full(sums, -1),
        meet_at=np.full(meeting, _NOT_YET), meet_waiter=np.full(meeting, -1),
        stack=np.arange(ranks)[::-1].copy(), ready=np.array([ranks]),
    )  # fmt: skip


@in_place
def run(p: Layout, s: State) -> bool:
    """Go on until every rank ends or waits; whether all of them have ended."""
    ranks = len(s.at)
    for pipe in range(len(p.target)):
        _post(p, s, pipe, p.ahead, s.clock[p.target[pipe]])
    while s.ready[0]:
        s.ready[0] -= 1
        rank = s.stack[s.ready[0]]
        entry, clock, end = s.at[rank], s.clock[rank], p.offsets[rank + 1]
        while entry < end:
            code = p.kind[entry]
            if code == SEND_F_ or code == SEND_B_:
                message = p.message[entry]
                line = p.line[message]
                if len(s.start):
                    s.start[entry] = clock
                s.move_start[message] = clock
                s.counts[p.pipe[line], _SENT] += 1
                _move(p, s, p.pipe[line])
                clock += p.busy[line]
                s.end[entry] = clock
            elif code == RECV_F_ or code == RECV_B_:
                message = p.message[entry]
                if not _arrived(p, s, rank, message, clock):
                    break
                if len(s.start):
                    s.start[entry] = clock
                clock = max(clock, s.move_end[message]) + p.busy[p.line[message]]
                s.end[entry] = clock
                pipe = p.pipe[p.line[message]]
                s.counts[pipe, _RECEIVED] += 1
                _post(p, s, pipe, s.counts[pipe, _RECEIVED] + p.ahead, clock)
            elif code == REDUCE_ or code == STEP_:
                for stream in range(1, STREAMS):
                    clock = max(clock, s.streams[rank, stream])
                if len(s.start) and s.part[rank] == 0:
                    s.start[entry] = clock
                if code == STEP_:
                    clock += p.duration[p.stage[entry], code]
                else:
                    s.clock[rank] = clock
                    if not _summed(p, s, rank):
                        break
                    clock = s.clock[rank]
                s.end[entry] = clock
            else:
                if len(p.first_meet) and not _together(p, s, rank, entry, clock):
                    break
                clock = _computed(p, s, rank, entry, clock)
            entry += 1
        s.at[rank] = entry
        if entry == end or p.kind[entry] != REDUCE_:
            s.clock[rank] = clock
    done = True
    for rank in range(ranks):
        done = done and s.at[rank] == p.offsets[rank + 1]
    return done


@kernel
def _computed(p: Layout, s: State, rank: int, entry: int, clock: float) -> float:
    """Run a compute action: the rank's clock behind it."""
    code = p.kind[entry]
    stream = p.stream[code]
    seconds = p.own_duration[entry] if len(p.own_duration) else p.duration[p.stage[entry], code]
    begin = clock
    if len(s.start):
        begin = max(begin, s.start[entry])  # not before what holds it has ended
    if len(p.first_meet):
        for m in range(p.first_meet[entry], p.first_meet[entry + 1]):
            begin = max(begin, s.meet_at[p.meets[m]])
    if stream:
        begin = max(begin, s.streams[rank, stream])
    end = begin + seconds
    if len(s.start):
        s.start[entry] = begin
    s.end[entry] = end
    if len(p.held) and p.held[entry] >= 0:
        s.start[p.held[entry]] = max(s.start[p.held[entry]], end)
    if stream:
        s.streams[rank, stream] = end
        end = clock
    return float(end)


@kernel
def _wake(s: State, rank: int) -> None:
    s.stack[s.ready[0]] = rank
    s.ready[0] += 1


@kernel
def _move(p: Layout, s: State, pipe: int) -> None:
    """Move what is sent and has a receive posted; wake the receiver if that is what it waits for."""
    first, moved, free = p.first[pipe], s.counts[pipe, _MOVED], s.free[pipe]
    until = min(s.counts[pipe, _SENT], s.counts[pipe, _POSTED])
    while moved < until:
        message = first + moved
        begin = max(s.move_start[message], s.move_end[message], free)
        free = begin + p.seconds[p.line[message]]
        s.move_start[message] = begin
        s.move_end[message] = free
        moved += 1
    s.free[pipe] = free
    s.counts[pipe, _MOVED] = moved
    target = p.target[pipe]
    awaited = s.awaited[target]
    if first <= awaited < first + moved:
        s.awaited[target] = -1
        _wake(s, target)


@kernel
def _post(p: Layout, s: State, pipe: int, count: int, clock: float) -> None:
    """Post receives until `count` of a pipe's messages have one."""
    first, posted = p.first[pipe], s.counts[pipe, _POSTED]
    until = min(count, p.first[pipe + 1] - first)
    while posted < until:
        s.move_end[first + posted] = clock
        posted += 1
    s.counts[pipe, _POSTED] = posted
    _move(p, s, pipe)


@kernel
def _arrived(p: Layout, s: State, rank: int, message: int, clock: float) -> bool:
    """Whether it is known when a message arrives. All receives up to it are posted, whatever the order of
    waiting."""
    pipe = p.pipe[p.line[message]]
    place = message - p.first[pipe]
    if s.counts[pipe, _POSTED] <= place:
        _post(p, s, pipe, place + 1, clock)
    if s.counts[pipe, _MOVED] > place:
        return True
    s.awaited[rank] = message
    return False


@kernel
def _together(p: Layout, s: State, rank: int, entry: int, clock: float) -> bool:
    """Whether all have come that begin together with an entry."""
    low, high = p.first_meet[entry], p.first_meet[entry + 1]
    if low < high and s.meet_at[entry] < 0:
        s.meet_at[entry] = clock
        waiter = s.meet_waiter[entry]
        while waiter >= 0:
            _wake(s, waiter)
            waiter = s.behind[waiter]
    for m in range(low, high):
        other = p.meets[m]
        if s.meet_at[other] < 0:
            s.behind[rank] = s.meet_waiter[other]
            s.meet_waiter[other] = rank
            return False
    return True


@kernel
def _summed(p: Layout, s: State, rank: int) -> bool:
    """Go through a rank's sums; each starts when the last of its ranks has come. `part` is even where the
    rank comes to a sum, odd where it waits in it."""
    low = p.first_sum[rank]
    while low + s.part[rank] // 2 < p.first_sum[rank + 1]:
        number = p.sums[low + s.part[rank] // 2]
        if s.part[rank] % 2 == 0:
            s.part[rank] += 1
            s.sum_at[number] = max(s.sum_at[number], s.clock[rank])
            s.sum_here[number] += 1
            if s.sum_here[number] == p.sum_ranks[number]:
                waiter = s.sum_waiter[number]
                while waiter >= 0:
                    _wake(s, waiter)
                    waiter = s.behind[waiter]
        if s.sum_here[number] < p.sum_ranks[number]:
            s.behind[rank] = s.sum_waiter[number]
            s.sum_waiter[number] = rank
            return False
        s.clock[rank] = s.sum_at[number] + p.sum_seconds[number]
        s.part[rank] += 1
    s.part[rank] = 0
    return True
