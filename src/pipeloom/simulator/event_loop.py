"""The event loop of the simulator, over columns.

Every rank walks its row with a clock of its own until it must wait. Messages from one rank to another move in
the order of the sender's row, so when one moves is known as soon as its send and its receive are. No global
queue of events is needed: time grows linearly with the program.

Links that several share are the exception: who gets one depends on who asks first, on whatever rank. There
what could move at once asks for its links, and only when every rank waits or has ended is the earliest of the
requests served. All that is asked later follows from that one, so it cannot be for an earlier time.

First come, first served, at the link's full rate. Real links give two at a time half the rate each: then the
last of them is through at the same time, and the others are later than here.

Of the ranks that can go on, the one that was woken last goes first, whatever its clock. Neighbours then hand
over to each other while what they share is still in the processor's cache, and the others collect messages in
the meantime for a long run of their own. In the order of waking, 1F1B would touch every rank for every
micro-batch.
"""

from __future__ import annotations

from ..ir.columns import OFFLOAD_, REDUCE_, RELOAD_, SEND_B_, SEND_F_, STEP_
from ..ir.kernels import kernel
from .link_queue import drop_first, request
from .loop_state import COMPUTES, COPY_IN, COPY_LANES, COPY_OUT, RECEIVES, SENDS, STREAMS, Layout, State
from .rendezvous import begin_sum, summed, together, wake

_SENT, _POSTED, _MOVED, _RECEIVED = 0, 1, 2, 3


@kernel
def run(p: Layout, s: State) -> None:
    """Go on until every rank ends or waits, where no link is shared."""
    for pipe in range(len(p.target)):
        _post(p, s, pipe, p.ahead, s.clock[p.target[pipe]])
    _go_on(p, s)


@kernel
def run_sharing(p: Layout, s: State) -> None:
    """The same where links are shared: a kernel of its own, as the other is faster without this."""
    for pipe in range(len(p.target)):
        _post(p, s, pipe, p.ahead, s.clock[p.target[pipe]])
    going = True
    while going:
        _go_on(p, s)
        _ask(p, s)
        going = s.queue.size[0] > 0
        if going:
            _serve(p, s)


@kernel
def _go_on(p: Layout, s: State) -> None:
    """Let all ranks go on until each ends or waits."""
    at_once = not len(s.start) and not len(p.first_meet) and not len(p.own_duration)
    while s.ready[0]:
        s.ready[0] -= 1
        rank = s.stack[s.ready[0]]
        entry, clock, end = s.at[rank], s.clock[rank], p.offsets[rank + 1]
        while entry < end:
            step = p.step[entry]
            what, number = step & 3, step >> 2
            if what == COMPUTES and at_once:
                clock += p.flat[number]
                s.end[entry] = clock
                entry += 1
                continue
            code = p.kind[entry]
            if len(p.room) and p.room[entry] >= 0:
                if not _is_away(p, s, rank, p.room[entry]):
                    break
                clock = max(clock, s.end[p.room[entry]])
            if what == SENDS:
                pipe = p.pipe[number]
                message = p.first[pipe] + s.counts[pipe, _SENT]
                if len(s.start):
                    s.start[entry] = clock
                s.move_start[message] = clock
                s.counts[pipe, _SENT] += 1
                _move(p, s, pipe)
                clock += p.busy[number]
                s.end[entry] = clock
            elif what == RECEIVES:
                pipe = p.pipe[number]
                message = p.first[pipe] + s.counts[pipe, _RECEIVED] if p.in_turn else p.message[entry]
                if not _arrived(p, s, rank, pipe, message, clock):
                    break
                if len(s.start):
                    s.start[entry] = clock
                clock = max(clock, s.move_end[message]) + p.busy[number]
                s.end[entry] = clock
                s.counts[pipe, _RECEIVED] += 1
                _post(p, s, pipe, s.counts[pipe, _RECEIVED] + p.ahead, clock)
            elif code == REDUCE_ or code == STEP_:
                closed = _closed(p, s, rank, entry, clock)
                if closed < 0:
                    break
                clock = closed
            elif (code == OFFLOAD_ or code == RELOAD_) and _issued(p, s, rank, entry, clock):
                pass  # it asks for its link, and the rank goes on
            else:
                if len(p.sharing.lanes) and not _is_back(p, s, rank, entry):
                    break
                if len(p.first_meet) and not together(p, s, rank, entry, clock):
                    break
                clock = _computed(p, s, rank, entry, clock)
            entry += 1
        s.at[rank] = entry
        if entry == end or p.kind[entry] != REDUCE_:
            s.clock[rank] = clock


@kernel
def _closed(p: Layout, s: State, rank: int, entry: int, clock: float) -> float:
    """Run a REDUCE or STEP: the rank's clock behind it, below 0 where it must wait."""
    s.clock[rank] = clock
    if len(p.sharing.lanes) and not _all_copied(s, rank):
        return -1.0
    for stream in range(1, STREAMS):
        clock = max(clock, s.streams[rank, stream])
    if len(s.start) and s.part[rank] == 0:
        s.start[entry] = clock
    if p.kind[entry] == STEP_:
        clock += p.duration[p.stage[entry], STEP_]
    else:
        s.clock[rank] = clock
        if not summed(p, s, rank):
            return -1.0
        clock = s.clock[rank]
    s.end[entry] = clock
    return float(clock)


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
def _move(p: Layout, s: State, pipe: int) -> None:
    """Move what is sent and has a receive posted; wake the receiver if that is what it waits for."""
    if len(p.sharing.gates) and p.sharing.gates[pipe, 0] >= 0:
        _note(s, pipe)
        return
    first, moved, free = p.first[pipe], s.counts[pipe, _MOVED], s.free[pipe]
    until = min(s.counts[pipe, _SENT], s.counts[pipe, _POSTED])
    pace = p.pace[pipe]
    while moved < until:
        message = first + moved
        begin = max(s.move_start[message], s.move_end[message], free)
        free = begin + (pace if pace >= 0 else p.seconds[p.route[message]])
        s.move_start[message] = begin
        s.move_end[message] = free
        moved += 1
    s.free[pipe] = free
    s.counts[pipe, _MOVED] = moved
    target = p.target[pipe]
    awaited = s.awaited[target]
    if first <= awaited < first + moved:
        s.awaited[target] = -1
        wake(s, target)


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
def _arrived(p: Layout, s: State, rank: int, pipe: int, message: int, clock: float) -> bool:
    """Whether it is known when a message arrives. All receives up to it are posted, whatever the order of
    waiting."""
    place = message - p.first[pipe]
    if s.counts[pipe, _POSTED] <= place:
        _post(p, s, pipe, place + 1, clock)
    if s.counts[pipe, _MOVED] > place:
        return True
    s.awaited[rank] = message
    return False


@kernel
def _note(s: State, number: int) -> None:
    """Remember a pipe, or behind all pipes a lane of a rank: something has come to it."""
    if not s.queue.noted[number]:
        s.queue.noted[number] = True
        s.queue.news[s.queue.size[1]] = number
        s.queue.size[1] += 1


@kernel
def _issued(p: Layout, s: State, rank: int, entry: int, clock: float) -> bool:
    """Note that a rank has come to a copy; false if its link is its own."""
    lane = COPY_IN if p.kind[entry] == RELOAD_ else COPY_OUT
    if not len(p.sharing.lanes) or p.sharing.lanes[rank, lane] < 0:
        return False
    s.queue.issued[entry] = clock
    _note(s, len(p.target) + COPY_LANES * rank + lane)
    return True


@kernel
def _ask(p: Layout, s: State) -> None:
    """Let what has come to pipes and lanes ask for links, as far as it could move or begin."""
    pipes = len(p.target)
    while s.queue.size[1]:
        s.queue.size[1] -= 1
        number = s.queue.news[s.queue.size[1]]
        s.queue.noted[number] = False
        if s.queue.asked[number]:
            continue
        time, entry = 0.0, -1
        if number < pipes:
            moved = s.counts[number, _MOVED]
            if moved < min(s.counts[number, _SENT], s.counts[number, _POSTED]):
                message = p.first[number] + moved
                time = max(s.move_start[message], s.move_end[message], s.free[number])
                entry = p.sharing.sender[message]
        else:
            rank, lane = divmod(number - pipes, COPY_LANES)
            head = s.queue.head[rank, lane]
            if head >= 0 and s.queue.issued[head] >= 0:
                needed = p.sharing.needs[head]
                if needed < 0 or s.queue.copied[needed]:
                    free = s.streams[rank, p.stream[p.kind[head]]]
                    time = max(s.queue.issued[head], free, s.start[head])
                    entry = head
        if entry >= 0:
            s.queue.asked[number] = True
            request(s, time, entry)


@kernel
def _is_back(p: Layout, s: State, rank: int, entry: int) -> bool:
    """Whether the RELOAD that an action waits for has its times."""
    needed = p.sharing.needs[entry]
    if needed < 0 or s.queue.copied[needed]:
        return True
    s.queue.awaited[rank] = needed
    return False


@kernel
def _is_away(p: Layout, s: State, rank: int, away: int) -> bool:
    """Whether the OFFLOAD whose room an action needs has its times."""
    if not len(p.sharing.lanes) or p.sharing.lanes[rank, COPY_OUT] < 0 or s.queue.copied[away]:
        return True
    s.queue.awaited[rank] = away
    return False


@kernel
def _all_copied(s: State, rank: int) -> bool:
    """Whether all copies of a rank have their times."""
    if s.queue.head[rank, COPY_OUT] < 0 and s.queue.head[rank, COPY_IN] < 0:
        return True
    s.queue.awaited[rank] = -2
    return False


@kernel
def _serve(p: Layout, s: State) -> None:
    """Give the earliest request its links, as soon as they are free."""
    time, entry = s.queue.time[0], s.queue.entry[0]
    drop_first(s)
    if entry >= len(p.kind):
        _serve_sum(p, s, entry - len(p.kind), time)
        return
    code = p.kind[entry]
    if code == SEND_F_ or code == SEND_B_:
        message = p.message[entry]
        route = p.route[message]
        pipe = p.pipe[route]
        leaves, enters = p.sharing.gates[pipe, 0], p.sharing.gates[pipe, 1]
        begin = max(time, s.queue.free[leaves], s.queue.free[enters])
        s.queue.free[leaves] = s.queue.free[enters] = begin + p.sharing.slot[route]
        s.move_start[message], s.move_end[message] = begin, begin + p.seconds[route]
        s.free[pipe] = s.move_end[message]
        s.counts[pipe, _MOVED] += 1
        target = p.target[pipe]
        if s.awaited[target] == message:
            s.awaited[target] = -1
            wake(s, target)
        s.queue.asked[pipe] = False
        _note(s, pipe)
    else:
        _copy(p, s, entry, time)


@kernel
def _serve_sum(p: Layout, s: State, number: int, time: float) -> None:
    """Begin a sum as soon as all links that it goes through are free."""
    low, high = p.sharing.first_gate[number], p.sharing.first_gate[number + 1]
    begin = time
    for at in range(low, high):
        begin = max(begin, s.queue.free[p.sharing.sum_gates[at]])
    for at in range(low, high):
        s.queue.free[p.sharing.sum_gates[at]] = begin + p.sharing.sum_slots[at]
    s.sum_at[number] = begin
    s.sum_here[number] += 1
    begin_sum(s, number)


@kernel
def _copy(p: Layout, s: State, entry: int, time: float) -> None:
    """Copy residuals as soon as the link is free, from when it was asked for."""
    code, stage = p.kind[entry], p.stage[entry]
    rank = p.sharing.home[stage]
    lane = COPY_IN if code == RELOAD_ else COPY_OUT
    link = p.sharing.lanes[rank, lane]
    begin = max(time, s.queue.free[link])
    s.queue.free[link] = begin + p.sharing.copy_slot[stage, lane]
    end = begin + (p.own_duration[entry] if len(p.own_duration) else p.duration[stage, code])
    s.start[entry], s.end[entry] = begin, end
    s.streams[rank, p.stream[code]] = end
    s.queue.copied[entry] = True
    if p.held[entry] >= 0:
        s.start[p.held[entry]] = max(s.start[p.held[entry]], end)
    s.queue.head[rank, lane] = p.sharing.next_copy[entry]
    number = len(p.target) + COPY_LANES * rank
    s.queue.asked[number + lane] = False
    for other in range(COPY_LANES):  # a RELOAD may have waited for this OFFLOAD
        _note(s, number + other)
    if s.queue.awaited[rank] == entry or s.queue.awaited[rank] == -2:
        s.queue.awaited[rank] = -1
        wake(s, rank)
