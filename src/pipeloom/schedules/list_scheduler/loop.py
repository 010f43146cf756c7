"""The loop of the list scheduler: numbers and arrays only, so that it runs compiled where that pays.

A place in a two-dimensional table of streams and micro-batches is `stream * size + micro-batch`.

A filler (W) is run where its rank would else wait, if it sticks out of the gap by no more than its overlap:

    now                  soon
     |<------ gap ------->|               soon: when the next of the rank's own heads can begin
     |<------ W ------------->|           W runs if  gap >= (1 - overlap) * seconds of W
"""

from __future__ import annotations

from ...ir.heap import pop, push
from ...ir.kernels import kernel
from .tables import EPS, NONE, WARM, SchedulerState, Tables

NOTHING, FILLABLE = -1, -2
"""`choose` found nothing to run; or nothing but a filler for which it was not asked."""

DONE, TOO_LONG = 0, 1


@kernel
def look(t: Tables, s: SchedulerState, index: int) -> None:
    at = t.order_at[index] + s.next[index]
    if at >= t.order_at[index + 1]:
        s.batch[index] = -1
        s.ready[index] = float("inf")
        return
    b = t.order[at]
    place = index * t.size + b
    s.batch[index] = b
    s.key[index] = t.place[place]
    s.ready[index] = float("inf") if s.missing[place] > 0 else s.arrival[place]


@kernel
def may_open(t: Tables, s: SchedulerState, index: int, b: int) -> bool:
    """Whether the limits let an F run now."""
    rank = t.rank[index]
    if s.opened[rank] >= t.open_rank[rank] or s.opened_stage[t.stage[index]] >= t.open_stage[t.stage[index]]:
        return False
    limit = t.limit[rank] + EPS
    if s.used[rank] + t.memory[index] > limit:
        return False
    if not t.safe:
        return True
    # The rest of the safe order must keep to the limit too. An F that runs early may take the room of one in
    # front of it, and all that frees any may stand behind that: then no rank could go on.
    #
    #     order    0F0 0F1 3F0 3B0 0B0 0F2 ...     stages 0 and 3, limit 3.  Done: 0F0 0F1.  0F2 now?
    #     level    2, 0F2: 3, 3F0: 4               no, as 3F0 would find no room
    #
    low = t.line_at[rank]
    mine = low + t.place[index * t.size + b]
    if t.early == NONE or (t.early == WARM and s.closed[rank]):
        for position in range(low + s.head[rank], mine):
            if not s.done[position] and not t.filler[t.line[position]]:
                return False
    # Fillers that could run now give back `owed` whenever room is short: they wait for nobody.
    level = s.used[rank] - s.owed[rank] + t.memory[index]
    for position in range(low + s.head[rank], mine):
        if not s.done[position]:
            level += t.memory[t.line[position]]
            if level > limit:
                return False
    return True


@kernel
def unit_arrival(t: Tables, s: SchedulerState, index: int) -> float:
    """When all streams of a unit have what they wait for and all its other ranks are free; infinite where
    that is not known yet."""
    seen: float = max(s.ready[index], s.hold[index])
    for at in range(t.unit_at[index], t.unit_at[index + 1]):
        other = t.unit[at]
        rank = t.rank[other]
        if s.batch[other] != s.batch[index] or (t.strict and s.key[other] != s.head[rank]):
            return float("inf")
        seen = max(seen, s.ready[other], s.hold[other], s.free[rank])
    return seen


@kernel
def unit_may_open(t: Tables, s: SchedulerState, index: int) -> bool:
    b = s.batch[index]
    if not may_open(t, s, index, b):
        return False
    for at in range(t.unit_at[index], t.unit_at[index + 1]):
        if not may_open(t, s, t.unit[at], b):
            return False
    return True


@kernel
def choose(t: Tables, s: SchedulerState, rank: int, now: float, fill: bool) -> int:
    """The stream that a rank runs next, or NOTHING, or FILLABLE.

    A unit on several ranks that is more urgent than what the rank could run, and whose other ranks will be
    free soon, is waited for; until then only what fits into the time runs. Otherwise ranks that always have
    something to do would hardly ever all be free at once. Nothing can block so: as soon as all ranks of a
    unit are free, the last of them may begin it, whatever the others wait for.
    """
    late = now + EPS
    best, best_key = -1, 0
    soon, soon_key = float("inf"), 0
    meet, meet_key = float("inf"), 0
    filler, filler_ready = -1, float("inf")
    full = False
    for at in range(t.own_at[rank], t.own_at[rank + 1]):
        index = t.own[at]
        arrival = s.ready[index]
        alone = t.unit_at[index] == t.unit_at[index + 1]
        if not alone and arrival != float("inf"):
            arrival = unit_arrival(t, s, index)
        if s.fills[index]:
            if filler < 0 or arrival < filler_ready:
                filler, filler_ready = index, arrival
            continue
        key = s.key[index]
        if arrival == float("inf") or (t.strict and key != s.head[rank]):
            continue
        arrival = max(arrival, s.hold[index])
        if best >= 0 and arrival <= late and key > best_key:
            continue
        if t.opens[index] and not unit_may_open(t, s, index):
            full = full or arrival <= late
            continue
        if arrival <= late:
            best, best_key = index, key
            continue
        if not alone and (meet == float("inf") or key < meet_key):
            meet, meet_key = arrival, key
        if arrival < soon and (s.unopened[rank] > 0 or t.urgent[index]):
            soon, soon_key = arrival, key
    if best >= 0 and meet_key < best_key and now + t.seconds[best] > meet + EPS:
        best, soon = -1, min(soon, meet)
    # Something could run. Wait all the same if a more urgent head arrives within `patience` of its time.
    if best >= 0:
        wait = t.patience * t.seconds[best]
        if not (wait > 0 and soon < now + wait - EPS and soon_key < best_key):
            return best
    if filler < 0 or filler_ready > late:
        if meet < float("inf"):
            push(s.event, s.event_rank, s.events, meet, rank)
        return NOTHING
    room = t.seconds[filler] * (1 - t.overlap[0 if s.unopened[rank] > 0 else 1])
    # Where an F was at hand and the limit was full, only a filler makes room.
    if fill and (full or soon >= now + room - EPS):
        return filler
    # Waiting until `soon` would make this the rank that was idle longest of all: rather stick out.
    if fill and t.level and s.idle[rank] + soon - s.free[rank] > s.idle[len(s.free)] + EPS:
        return filler
    if fill and meet < float("inf"):
        push(s.event, s.event_rank, s.events, meet, rank)
    return FILLABLE


@kernel
def begin(t: Tables, s: SchedulerState, index: int, now: float, end: float, free: float) -> None:
    """Run the next action of a stream: its results are there at `end`, its rank is free again at `free`."""
    rank, b = t.rank[index], s.batch[index]
    s.left[rank] -= t.seconds[index]  # now + left is when the rank ends at the earliest, see `within`
    if s.written[rank] > 0:
        s.idle[rank] += now - s.free[rank]
        s.idle[len(s.free)] = max(s.idle[len(s.free)], s.idle[rank])
    s.free[rank] = free
    entry = t.row_at[rank] + s.written[rank]
    s.row[entry], s.row_batch[entry], s.start[entry] = index, b, now
    s.written[rank] += 1
    s.used[rank] += t.memory[index]
    if t.filler[index]:
        s.owed[rank] += t.memory[index]
    else:
        s.peak[rank] = max(s.peak[rank], s.used[rank])
        if t.opens[index]:
            s.opened[rank] += 1
            s.opened_stage[t.stage[index]] += 1
            s.unopened[rank] -= 1
            if s.unopened[rank] == 0 and not t.strict:  # the drain begins
                for at in range(t.own_at[rank], t.own_at[rank + 1]):
                    s.fills[t.own[at]] |= t.drains[t.own[at]]
        elif t.closes[index]:
            s.opened[rank] -= 1
            s.closed[rank] = True
            s.opened_stage[t.stage[index]] -= 1
    place = t.place[index * t.size + b]
    low, high = t.line_at[rank], t.line_at[rank + 1]
    if place >= 0 and low < high:
        s.done[low + place] = True
        while low + s.head[rank] < high and s.done[low + s.head[rank]]:
            s.head[rank] += 1
    s.next[index] += 1
    look(t, s, index)
    push(s.event, s.event_rank, s.events, free, rank)
    # Users learn of the end at the start. So a rank that looks around sees what will arrive during a filler.
    for at in range(t.feeds_at[index], t.feeds_at[index + 1]):
        user = t.feeds[at]
        fed = user * t.size + b
        seen, route = end, t.route[at]
        if route >= 0:  # messages of a link follow each other
            seen = max(end, s.link[route]) + t.delay[at]
            s.link[route] = seen
        s.missing[fed] -= 1
        s.arrival[fed] = max(s.arrival[fed], seen)
        if s.missing[fed] == 0:
            announce(t, s, user, b, now)


@kernel
def hold_back(t: Tables, s: SchedulerState, rank: int) -> None:
    """Hold nothing back: in its place stands what a user's functions say, where there are any."""


@kernel
def begin_unit(t: Tables, s: SchedulerState, index: int, now: float) -> None:
    """Run the next action of a stream, and with it those of its unit on other ranks."""
    b = s.batch[index]
    for at in range(t.unit_at[index] - 1, t.unit_at[index + 1]):
        member = index if at < t.unit_at[index] else t.unit[at]
        end = free = now + t.seconds[member]
        if len(t.before) > 0:
            place = member * t.size + b
            end = now + t.before[place] + t.seconds[member]
            free = end + t.after[place]
        begin(t, s, member, now, end, free)


@kernel
def announce(t: Tables, s: SchedulerState, user: int, b: int, now: float) -> None:
    """All that an action of a stream waits for will be there."""
    rank, seen = t.rank[user], s.arrival[user * t.size + b]
    if t.filler[user]:
        s.owed[rank] -= t.memory[user]
        place, low = t.place[user * t.size + b], t.line_at[rank]
        if place >= 0 and low < t.line_at[rank + 1]:
            s.done[low + place] = True  # in `may_open` it counts among what is owed, and not again
    if s.batch[user] == b:
        s.ready[user] = seen
    # A rank that is busy until then looks around by itself when it is free.
    if seen > s.free[rank] or seen <= now + EPS:
        push(s.event, s.event_rank, s.events, seen, rank)


@kernel
def wake(s: SchedulerState) -> tuple[float, int]:
    """The time, and how many free ranks look around then: the first so many of `s.woken`."""
    now, count = s.event[0], 0
    while s.events[0] > 0 and s.event[0] <= now + EPS:
        now = max(now, s.event[0])
        rank = pop(s.event, s.event_rank, s.events)
        if s.free[rank] <= now + EPS and not s.marked[rank]:
            s.woken[count] = rank
            s.marked[rank] = True
            count += 1
    for i in range(count):
        s.marked[s.woken[i]] = False
    return now, count


@kernel
def order_all(t: Tables, s: SchedulerState, ranks: int) -> int:
    for rank in range(ranks):
        push(s.event, s.event_rank, s.events, 0.0, rank)
    while s.events[0] > 0:
        now, count = wake(s)
        # Fillers only once all ranks have begun what they can: what begins at this moment announces its end,
        # and then a gap may turn out to be too short.
        for fill in range(2):
            waiting = 0
            for i in range(count):
                rank = s.woken[i]
                if s.free[rank] > now + EPS:  # another rank has begun a unit with it
                    continue
                hold_back(t, s, rank)
                index = choose(t, s, rank, now, fill == 1)
                if index >= 0:
                    if now + s.left[rank] > t.within:
                        return TOO_LONG
                    begin_unit(t, s, index, now)
                elif index == FILLABLE:
                    s.woken[waiting] = rank
                    waiting += 1
            count = waiting
    return DONE
