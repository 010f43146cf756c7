"""What the event loop reads and changes, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..ir.columns import Bools, Codes, Floats, Ints, Longs
from ..ir.kernels import kernel

COMPUTES, SENDS, RECEIVES, OTHER = range(4)
"""What an entry is, in the two lowest bits of its `ProgramLayout.code`."""
COPY_LANES = 2
COPY_OUT, COPY_IN = range(COPY_LANES)
"""The lanes of a rank: of its OFFLOADs, and of its RELOADs."""
SENT, POSTED, MOVED, RECEIVED = range(4)
"""Columns of `SimulatorState.counts`."""


class SharedLinks(NamedTuple):
    """What goes through links that several share. All arrays are empty where none is shared.

    A message takes two links at once, out of one node and into another; a copy takes one; a sum over ranks
    takes `sum_links[first_sum_link[n] : first_sum_link[n + 1]]`.
    """

    channel_links: Ints
    """(channels, 2): the links that its messages leave and enter through, -1 for none."""
    message_link_s: Floats
    """(routes,): seconds that a message takes of each."""
    sender: Ints
    """(messages,): the entry that sends it."""
    home: Ints
    """(stages,): its rank."""
    copy_link: Ints
    """(ranks, lanes): the link of its copies, -1 for none."""
    copy_link_s: Floats
    """(stages, lanes): seconds that a copy takes of it."""
    first_copy: Ints
    """(ranks, lanes): the first such entry, -1 for none."""
    next_copy: Ints
    """(entries,): of a copy the next one of its lane, else -1."""
    needs: Ints
    """(entries,): the RELOAD that RECOMPUTE, B or I waits for, the OFFLOAD of an AWAIT or RELOAD, else -1."""
    first_sum_link: Ints
    """(sums + 1,)"""
    sum_links: Ints
    sum_link_s: Floats
    """Seconds that a sum takes of each of its links."""
    link_count: int


class ProgramLayout(NamedTuple):
    """What runs. Entries are those of the program's columns.

    A channel leads from one rank to another and carries messages of several routes, in the order sent;
    messages are numbered channel by channel. Arrays are empty where a program has nothing of a kind. All
    times are in seconds. Numbers of channels, ranks and sums have 64 bits, as those of loops have: else
    kernels that take one would be compiled twice.
    """

    kind: Codes
    stage: Ints
    offsets: Longs
    code: Ints
    """(entries,): all that most of them need, in one number: 4 * n + what it is. For COMPUTES n is the index
    into `flat_duration`, for SENDS and RECEIVES the route; 0 for OTHER."""
    in_order: bool
    """Whether all ranks receive in the order sent."""
    upto: Longs
    """(messages,): item first_message[c] + k is how many messages of channel c there are up to the last sent
    of those k + 1 that its rank receives first. Empty where all stand in the order sent."""
    message: Ints
    """(entries,): -1 for no transfer."""
    route: Ints
    """(messages,)"""
    channel: Longs
    """(routes,): -1 for a route within a rank."""
    seconds: Floats
    """(routes,): time that a message is on its way."""
    occupied: Floats
    """(routes,): time for which it keeps its sender, and its receiver."""
    channel_seconds: Floats
    """(channels,): `seconds` where all its messages take the same, else -1."""
    first_message: Longs
    """(channels + 1,)"""
    target: Longs
    """(channels,): the rank that it leads to."""
    duration: Floats
    """(stages, kinds)"""
    flat_duration: Floats
    """The same in one row."""
    entry_duration: Floats
    """(entries,) where some differ from that, else empty."""
    stream: Ints
    """(kinds,): 0 computes, others run beside it."""
    blocks: Ints
    """(entries,): the entry that cannot begin before this one ends, -1 for none."""
    first_meet: Ints
    """(entries + 1,): what begins together with e is `meets[first_meet[e] : first_meet[e + 1]]`."""
    meets: Ints
    microbatch: Ints
    """(entries,): of REDUCE and STEP the update, -1 where there is only one."""
    updates: int
    step_begins: Longs
    """(entries,): the number of the step that the rank begins there, 0 for none; empty for one step."""
    due: Longs
    """(channels, steps): how many of its messages may have a receive posted, as a rank posts those of a step
    only once it has begun."""
    first_sum: Ints
    """(ranks * updates + 1,): with n = r * updates + u, the REDUCE of update u of rank r goes through
    the sums `sums[first_sum[n] : first_sum[n + 1]]`."""
    sums: Longs
    sum_arrivals: Ints
    """(sums,): how many it waits for to begin: its ranks, a norm for the other sums of its update, too."""
    norm_behind: Longs
    """(sums,): the sum of the norm that waits for it, -1 for none; empty where no update awaits a norm."""
    sum_seconds: Floats
    """(sums,)"""
    receive_ahead: int
    """Receives that a rank keeps posted on each channel, of those that it comes to next."""
    shared: SharedLinks


@kernel
def posted_ahead(p: ProgramLayout, channel: int, received: int) -> int:
    """How many of a channel's messages have a receive posted once its rank has received so many."""
    if p.in_order:
        return received + p.receive_ahead
    first, end = p.first_message[channel], p.first_message[channel + 1]
    last = min(first + received + p.receive_ahead, end) - 1
    return int(p.upto[last]) if last >= first else 0


class LinkRequests(NamedTuple):
    """Requests for shared links, and who waits. Sources are the channels, then the lanes of each rank.

    A source requests its links for one message or copy at a time:

        something comes to it  ->  pending  ->  requested, in the heap  ->  served: has its times
    """

    time: Floats
    """Heap of requests, by time and then by entry."""
    entry: Longs
    """What each is for: the entry of a SEND or a copy; behind all entries, the number of a sum."""
    pending: Longs
    """Stack of sources to which something has come."""
    size: Longs
    """(2,): of the heap, and of `pending`."""
    requested: Bools
    """(sources,): whether its next one is in the heap."""
    is_pending: Bools
    """(sources,): whether it is in `pending`."""
    link_free: Floats
    """(links,): when each is free."""
    issued: Floats
    """(entries,): of a copy when its rank came to it, -1 before."""
    copied: Bools
    """(entries,): whether a copy has its times."""
    head: Longs
    """(ranks, lanes): the next copy, -1 for none."""
    awaited: Longs
    """(ranks,): the copy that it waits for; -1 none, -2 all."""


class SimulatorState(NamedTuple):
    """What changes. All times are in seconds."""

    start: Floats
    """(entries,), or empty, see `new_state`."""
    end: Floats
    """(entries,)"""
    transfer_start: Floats
    """(messages,); before it moves, when it was sent."""
    transfer_end: Floats
    """(messages,); before it moves, when its receive was posted."""
    position: Longs
    """(ranks,): the entry at which it stands."""
    clock: Floats
    """(ranks,)"""
    step: Longs
    """(ranks,): which of several it is in."""
    awaited: Longs
    """(ranks,): the message that it waits for, -1 for none."""
    sum_part: Longs
    """(ranks,): where in its REDUCE it is, see `event_loop._run_all_reduces`."""
    next_waiter: Longs
    """(ranks,): who waits behind it for the same thing, -1 for none."""
    stream_free: Floats
    """(ranks, streams): when each is free."""
    counts: Longs
    """(channels, 4): messages sent, posted, moved and received."""
    channel_free: Floats
    """(channels,): when it is free."""
    sum_start: Floats
    """(sums,): when the last of those that have come to it came."""
    sum_arrived: Longs
    """(sums,): how many have come."""
    sum_waiter: Longs
    """(sums,): the first rank that waits for it, -1 for none."""
    meet_start: Floats
    """(entries,): when its rank came to it, below 0 before."""
    meet_waiter: Longs
    """(entries,): the first rank that waits for that, -1 for none."""
    runnable: Longs
    """Stack of ranks that can go on."""
    runnable_count: Longs
    """(1,)"""
    requests: LinkRequests


STREAMS, FIRST_COPIES = 5, 3
"""Computing, and those that run beside it: first of operations, then of copies."""
NOT_YET = -1.0


def new_state(layout: ProgramLayout, ranks: int, *, starts: bool = True) -> SimulatorState:
    """Everything before the first event.

    starts: whether to note when entries start. Where nothing meets others or runs beside computing, each
    starts when the one before it in its row ends, so that need not be stored.
    """
    entries, channels = len(layout.kind), len(layout.target)
    sums, meeting = len(layout.sum_arrivals), len(layout.first_meet)
    return SimulatorState(
        start=np.zeros(entries if starts else 0),
        end=np.zeros(entries),
        transfer_start=np.zeros(len(layout.route)),
        transfer_end=np.zeros(len(layout.route)),
        position=layout.offsets[:-1].copy(),
        clock=np.zeros(ranks),
        step=np.zeros(ranks, np.int64),
        awaited=np.full(ranks, -1),
        sum_part=np.zeros(ranks, np.int64),
        next_waiter=np.full(ranks, -1),
        stream_free=np.zeros((ranks, STREAMS)),
        counts=np.zeros((channels, 4), np.int64),
        channel_free=np.zeros(channels),
        sum_start=np.zeros(sums),
        sum_arrived=np.zeros(sums, np.int64),
        sum_waiter=np.full(sums, -1),
        meet_start=np.full(meeting, NOT_YET),
        meet_waiter=np.full(meeting, -1),
        runnable=np.arange(ranks)[::-1].copy(),
        runnable_count=np.array([ranks]),
        requests=_new_requests(layout.shared, channels),
    )


def _new_requests(shared: SharedLinks, channels: int) -> LinkRequests:
    copies, ranks = len(shared.next_copy), len(shared.copy_link)
    most = channels + COPY_LANES * ranks + len(shared.first_sum_link) if shared.link_count else 0
    return LinkRequests(
        time=np.zeros(most),
        entry=np.zeros(most, np.int64),
        pending=np.zeros(most, np.int64),
        size=np.zeros(2, np.int64),
        requested=np.zeros(most, np.bool_),
        is_pending=np.zeros(most, np.bool_),
        link_free=np.zeros(shared.link_count),
        issued=np.full(copies, NOT_YET),
        copied=np.zeros(copies, np.bool_),
        head=shared.first_copy.astype(np.int64),
        awaited=np.full(ranks, -1),
    )


@kernel
def wake(s: SimulatorState, rank: int) -> None:
    s.runnable[s.runnable_count[0]] = rank
    s.runnable_count[0] += 1


@kernel
def wake_all_reduce(s: SimulatorState, number: int) -> None:
    waiter = s.sum_waiter[number]
    while waiter >= 0:
        wake(s, waiter)
        waiter = s.next_waiter[waiter]


@kernel
def sums_end(p: ProgramLayout, s: SimulatorState, low: int, high: int) -> float:
    """When a rank has sums whose starts are known. They follow each other, each from when the last rank had
    come, as they share the rank's links."""
    end = 0.0
    for at in range(low, high):
        end = max(end, s.sum_start[p.sums[at]]) + p.sum_seconds[p.sums[at]]
    return float(end)
