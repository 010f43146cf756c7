"""Replay: what each rank held, from the times of a simulation that has run.

Changes of one rank come from three sources, each in the order of time: its own row, its messages that are
through, and what its partner lends it. At equal times messages that are through go first, then the rank's own
order decides: what ends goes before what begins comes. Residuals that a partner sends come last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..ir.columns import RECV_B_, RECV_F_, SEND_B_, SEND_F_, Bools, Ints, Longs
from ..ir.kernels import allocating, kernel
from .loop_state import Floats, Layout, State

RESIDUALS, BOUNDARY, TRANSIENT = 0, 1, 2


class Lent(NamedTuple):
    """What each rank keeps for its partner: changes `first[r] : first[r + 1]`, by time; late: 2 for what
    comes after the rank's own changes of that time, 0 for what goes before them."""

    first: Ints
    time: Floats
    late: Ints
    size: Longs


class Books(NamedTuple):
    """begin, finish: change of residuals, boundary and transient bytes when an action begins and ends, by
    stage and kind.  bare: per entry whether it is an F that keeps `dropped[stage]` bytes less, as RECOMPUTE
    makes them again; empty where there is none.  message_bytes: by route.  begin_s: when each rank starts.
    pipes_in, pipes_out: of each rank."""

    begin: Longs
    finish: Longs
    bare: Bools
    dropped: Longs
    message_bytes: Longs
    begin_s: Floats
    first_in: Ints
    pipes_in: Ints
    first_out: Ints
    pipes_out: Ints
    lent: Lent

    def outgoing(self, rank: int) -> Ints:
        return self.pipes_out[self.first_out[rank] : self.first_out[rank + 1]]


class Work(NamedTuple):
    """What one pass over a row needs, all zero before the first.

    counts: per pipe the messages posted, received and gone.  sums: bytes of each kind, the most of all kinds
    together, the number of changes, and the pipe of the message that is through next.  next_gone: when it is.
    """

    counts: Longs
    sums: Longs
    next_gone: Floats


_POSTED, _RECEIVED, _GONE = 0, 1, 2
_PEAK, _COUNT, _NEXT = 3, 4, 5


def replay(
    p: Layout, s: State, b: Books, ranks: tuple[int, int], at_peak: Longs, curve: tuple[Floats, Longs]
) -> int:
    """Go through the changes of some ranks; fills `at_peak` for each, and `curve`, if it has room, with the
    bytes from each time on beside what is static. Returns how many changes there were on the last rank."""
    if not len(s.start):
        work = Work(np.zeros((3, len(p.target)), np.int64), np.zeros(6, np.int64), np.zeros(1))
        _in_order(p, s, b, ranks, work, (at_peak, *curve))
        return int(work.sums[_COUNT])
    most = int(np.diff(p.offsets[ranks[0] : ranks[1] + 1]).max(initial=0))
    made = np.zeros(2 * most + 1), np.zeros((2 * most + 1, 3), np.int64)
    pipes = np.zeros(len(p.target), np.int64), np.zeros(len(p.target), np.int64)
    count = 0
    for rank in range(ranks[0], ranks[1]):
        own = _own(p, s, b, rank, made, pipes)
        count = _with_others(p, s, b, (rank, own), made, (at_peak, *curve))
    return count


@kernel
def _in_order(
    p: Layout, s: State, b: Books, ranks: tuple[int, int], work: Work, out: tuple[Longs, Floats, Longs]
) -> None:
    """All changes of some ranks in one pass: their rows are in the order of time."""
    for rank in range(ranks[0], ranks[1]):
        _row_in_order(p, s, b, rank, work, out)


@kernel
def _row_in_order(
    p: Layout, s: State, b: Books, rank: int, work: Work, out: tuple[Longs, Floats, Longs]
) -> None:
    for number in range(len(work.sums)):
        work.sums[number] = 0
    of = (p, s, b)
    _find_gone(p, s, b, rank, work)
    clock = b.begin_s[rank]
    for at in range(b.first_in[rank], b.first_in[rank + 1]):
        _buffers(of, (rank, b.pipes_in[at], p.ahead), clock, work, out)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code, end = p.kind[entry], s.end[entry]
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            pipe = p.pipe[p.route[message]]
            work.counts[_RECEIVED, pipe] += 1
            _buffers(of, (rank, pipe, message - p.first[pipe] + 1), clock, work, out)
            _buffers(of, (rank, pipe, work.counts[_RECEIVED, pipe] + p.ahead), end, work, out)
        elif code != SEND_F_ and code != SEND_B_:
            stage = p.stage[entry]
            _book(of, (b.begin, rank, stage, code), clock, work, out)
            _book(of, (b.finish, rank, stage, code), end, work, out)
        clock = end
    _let_go(of, rank, np.inf, work, out)


@kernel
def _buffers(
    of: tuple[Layout, State, Books],
    goal: tuple[int, int, int],
    time: float,
    work: Work,
    out: tuple[Longs, Floats, Longs],
) -> None:
    """A buffer for each receive that is posted; goal: rank, pipe, how many of its messages then have one."""
    p, _, b = of
    rank, pipe, upto = goal
    until = min(upto, p.first[pipe + 1] - p.first[pipe])
    while work.counts[_POSTED, pipe] < until:
        _let_go(of, rank, time, work, out)
        size = b.message_bytes[p.route[p.first[pipe] + work.counts[_POSTED, pipe]]]
        work.counts[_POSTED, pipe] += 1
        work.sums[BOUNDARY] += size
        _note(rank, time, work, out)


@kernel
def _book(
    of: tuple[Layout, State, Books],
    what: tuple[Longs, int, int, int],
    time: float,
    work: Work,
    out: tuple[Longs, Floats, Longs],
) -> None:
    """What a table says of a (stage, kind) on a rank, if anything."""
    table, rank, stage, code = what
    residuals, boundary = table[stage, code, RESIDUALS], table[stage, code, BOUNDARY]
    transient = table[stage, code, TRANSIENT]
    if residuals or boundary or transient:
        _let_go(of, rank, time, work, out)
        work.sums[RESIDUALS] += residuals
        work.sums[BOUNDARY] += boundary
        work.sums[TRANSIENT] += transient
        _note(rank, time, work, out)


@kernel
def _let_go(
    of: tuple[Layout, State, Books], rank: int, time: float, work: Work, out: tuple[Longs, Floats, Longs]
) -> None:
    """Messages of a rank that are through by `time`."""
    p, s, b = of
    while work.next_gone[0] <= time:
        pipe = work.sums[_NEXT]
        if pipe < 0:
            break
        work.sums[BOUNDARY] -= b.message_bytes[p.route[p.first[pipe] + work.counts[_GONE, pipe]]]
        work.counts[_GONE, pipe] += 1
        _note(rank, work.next_gone[0], work, out)
        _find_gone(p, s, b, rank, work)


@kernel
def _find_gone(p: Layout, s: State, b: Books, rank: int, work: Work) -> None:
    """The message of a rank that is through next; of several at the same time, that of the first pipe."""
    work.next_gone[0] = np.inf
    work.sums[_NEXT] = -1
    for at in range(b.first_out[rank], b.first_out[rank + 1]):
        pipe = b.pipes_out[at]
        message = p.first[pipe] + work.counts[_GONE, pipe]
        if message < p.first[pipe + 1] and (work.sums[_NEXT] < 0 or s.move_end[message] < work.next_gone[0]):
            work.next_gone[0] = s.move_end[message]
            work.sums[_NEXT] = pipe


@kernel
def _note(rank: int, time: float, work: Work, out: tuple[Longs, Floats, Longs]) -> None:
    """Keep a rank's first peak, and the curve where it is asked for."""
    at_peak, curve_time, curve_size = out
    held = work.sums[RESIDUALS] + work.sums[BOUNDARY] + work.sums[TRANSIENT]
    if held > work.sums[_PEAK]:
        work.sums[_PEAK] = held
        for part in range(3):
            at_peak[rank, part] = work.sums[part]
    if len(curve_time):
        curve_time[work.sums[_COUNT]] = time
        curve_size[work.sums[_COUNT]] = held
    work.sums[_COUNT] += 1


@allocating
def _with_others(
    p: Layout,
    s: State,
    b: Books,
    own: tuple[int, int],
    made: tuple[Floats, Longs],
    out: tuple[Longs, Floats, Longs],
) -> int:
    """Add what others change to the changes of a rank's own row; own: the rank, and how many those are."""
    rank, count = own
    time, change = made
    at_peak, curve_time, curve_size = out
    order = np.argsort(time[:count], kind="mergesort") if _jumps(time, count) else np.arange(count)
    gone_at, gone = through(p, s, b, rank)
    curve = (curve_time, curve_size)
    return int(_merged((time, change, order), (gone_at, gone), b.lent, rank, at_peak, curve))


@kernel
def _jumps(time: Floats, count: int) -> bool:
    """Whether times go back anywhere, as those of actions beside computing may."""
    for at in range(1, count):
        if time[at] < time[at - 1]:
            return True
    return False


@kernel
def _own(
    p: Layout, s: State, b: Books, rank: int, made: tuple[Floats, Longs], pipes: tuple[Longs, Longs]
) -> int:
    """The changes by a rank's own row, in its order: how many there are."""
    time, change = made
    posted, received = pipes
    count = 0
    for at in range(b.first_in[rank], b.first_in[rank + 1]):
        pipe = b.pipes_in[at]
        count = _post(p, b, (pipe, p.ahead), b.begin_s[rank], (time, change, posted), count)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code = p.kind[entry]
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            pipe = p.pipe[p.route[message]]
            upto = message - p.first[pipe] + 1
            count = _post(p, b, (pipe, upto), _start(p, s, b, rank, entry), (time, change, posted), count)
            received[pipe] += 1
            upto = received[pipe] + p.ahead
            count = _post(p, b, (pipe, upto), s.end[entry], (time, change, posted), count)
        elif code != SEND_F_ and code != SEND_B_:
            stage = p.stage[entry]
            before = count
            count += _changed(b.begin, (stage, code), _start(p, s, b, rank, entry), time, change, count)
            if count > before and len(b.bare) and b.bare[entry]:
                change[before, RESIDUALS] -= b.dropped[stage]
            count += _changed(b.finish, (stage, code), s.end[entry], time, change, count)
    return count


@kernel
def _changed(
    table: Longs, key: tuple[int, int], clock: float, time: Floats, change: Longs, count: int
) -> int:
    """Note what a table says of a (stage, kind): 1, or 0 if that is nothing."""
    stage, code = key
    some = False
    for part in range(3):
        change[count, part] = table[stage, code, part]
        some = some or table[stage, code, part] != 0
    time[count] = clock
    return 1 if some else 0


@kernel
def _start(p: Layout, s: State, b: Books, rank: int, entry: int) -> float:
    """When an entry starts: where that is not noted, when the one before it ends."""
    if len(s.start):
        return float(s.start[entry])
    if entry == p.offsets[rank]:
        return float(b.begin_s[rank])
    return float(s.end[entry - 1])


@kernel
def _post(
    p: Layout, b: Books, goal: tuple[int, int], clock: float, made: tuple[Floats, Longs, Longs], count: int
) -> int:
    """A buffer for each receive that is posted; goal: a pipe, and how many of its messages then have one."""
    time, change, posted = made
    pipe, upto = goal
    until = min(upto, p.first[pipe + 1] - p.first[pipe])
    while posted[pipe] < until:
        time[count] = clock
        change[count, RESIDUALS] = 0
        change[count, TRANSIENT] = 0
        change[count, BOUNDARY] = b.message_bytes[p.route[p.first[pipe] + posted[pipe]]]
        posted[pipe] += 1
        count += 1
    return count


@allocating
def through(p: Layout, s: State, b: Books, rank: int) -> tuple[Floats, Longs]:
    """When each message of a rank is through, and its bytes, by time: pipes merged one after the other."""
    low, high = b.first_out[rank], b.first_out[rank + 1]
    total = 0
    for at in range(low, high):
        total += p.first[b.pipes_out[at] + 1] - p.first[b.pipes_out[at]]
    times, sizes, place = np.empty(total), np.empty(total, np.int64), 0
    for at in range(low, high):
        pipe = b.pipes_out[at]
        for message in range(p.first[pipe], p.first[pipe + 1]):
            times[place] = s.move_end[message]
            sizes[place] = b.message_bytes[p.route[message]]
            place += 1
    width = 1
    bounds = np.zeros(high - low + 1, np.int64)
    for at in range(low, high):
        pipe = b.pipes_out[at]
        bounds[at - low + 1] = bounds[at - low] + p.first[pipe + 1] - p.first[pipe]
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


@kernel
def _merged(
    own: tuple[Floats, Longs, Longs],
    gone: tuple[Floats, Longs],
    lent: Lent,
    rank: int,
    at_peak: Longs,
    curve: tuple[Floats, Longs],
) -> int:
    """Add up a rank's changes in the order of time; keeps its first peak in `at_peak`."""
    time, change, order = own
    gone_at, gone_size = gone
    curve_time, curve_size = curve
    at_own, at_gone, at_lent = 0, 0, lent.first[rank]
    residuals, boundary, transient, peak, count = 0, 0, 0, 0, 0
    while at_own < len(order) or at_gone < len(gone_at) or at_lent < lent.first[rank + 1]:
        own_time = time[order[at_own]] if at_own < len(order) else np.inf
        gone_time = gone_at[at_gone] if at_gone < len(gone_at) else np.inf
        lent_time = lent.time[at_lent] if at_lent < lent.first[rank + 1] else np.inf
        if gone_time <= own_time and gone_time <= lent_time:
            now = gone_time
            boundary -= gone_size[at_gone]
            at_gone += 1
        elif lent_time < own_time or (lent_time == own_time and lent.late[at_lent] == 0):
            now = lent_time
            residuals += lent.size[at_lent]
            at_lent += 1
        else:
            now = own_time
            row = order[at_own]
            residuals += change[row, RESIDUALS]
            boundary += change[row, BOUNDARY]
            transient += change[row, TRANSIENT]
            at_own += 1
        held = residuals + boundary + transient
        if held > peak:
            peak = held
            at_peak[rank, RESIDUALS] = residuals
            at_peak[rank, BOUNDARY] = boundary
            at_peak[rank, TRANSIENT] = transient
        if len(curve_time):
            curve_time[count] = now
            curve_size[count] = held
        count += 1
    return count
