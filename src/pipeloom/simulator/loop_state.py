"""What the event loop reads and changes, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ir.columns import Bools, Codes, Ints, Longs

Floats = NDArray[np.float64]

COMPUTES, SENDS, RECEIVES, OTHER = range(4)
"""What an entry is, in the two lowest bits of its `Layout.step`."""
COPY_LANES = 2
COPY_OUT, COPY_IN = range(COPY_LANES)
"""The lanes of a rank: of its OFFLOADs, and of its RELOADs."""


class Sharing(NamedTuple):
    """What goes through links that several share. All empty where nothing does.

    gates: by pipe the shared links that its messages leave and enter through, -1 for none.  slot: by route,
        how long a message takes of each.  sender: by message, the entry that sends it.
    home: rank by stage.  lanes: by (rank, 0 for OFFLOAD or 1 for RELOAD) the shared link of its copies, -1
        for none.  copy_slot: by (stage, 0 or 1), how long a copy takes of it.  first_copy: by (rank, 0 or 1)
        the first such entry, or -1.  next_copy: per such entry the next one.  needs: per entry the RELOAD
        that RECOMPUTE, B or I, and the OFFLOAD that a RELOAD waits for, or -1.
    first_gate, sum_gates, sum_slots: by sum over ranks, the shared links that it goes through, and how long
        it takes of each.
    """

    gates: Ints
    slot: Floats
    sender: Ints
    home: Ints
    lanes: Ints
    copy_slot: Floats
    first_copy: Ints
    next_copy: Ints
    needs: Ints
    first_gate: Ints
    sum_gates: Ints
    sum_slots: Floats
    links: int


class Layout(NamedTuple):
    """What runs. Entries are those of the program's columns; messages are numbered pipe by pipe, in the order
    sent; a pipe leads from one rank to another. Empty arrays where a program has nothing of a kind.

    step: per entry all that most of them need, in one number: above what it is, for COMPUTES its place in
    `flat`, for SENDS and RECEIVES its route; 0 for OTHER.  in_turn: whether ranks receive in the order sent.
    message: per entry, -1 for no transfer.  route: per message.  pipe, seconds, busy: per route: time that a
    message takes, and for which it keeps its sender.  pace: by pipe, that time if all its messages take the
    same, else -1.  first: of each pipe's messages, and their number.
    duration: by (stage, kind); flat: the same in one row; own_duration: per entry, where some differ from
    that.  stream: by kind, 0 computes, others run beside.  held: per entry the entry that cannot begin before
    it ends, or -1.  room: per entry the OFFLOAD that its rank waits for in front of it, see `room`, or -1.
    first_meet, meets: entries that begin together with an entry.
    first_sum, sums: sums of each rank's REDUCE in order; by sum how many ranks meet, and how long it takes.
    """

    kind: Codes
    stage: Ints
    offsets: Longs
    step: Ints
    in_turn: bool
    message: Ints
    route: Ints
    pipe: Ints
    seconds: Floats
    busy: Floats
    pace: Floats
    first: Longs
    target: Ints
    duration: Floats
    flat: Floats
    own_duration: Floats
    stream: Ints
    held: Ints
    room: Ints
    first_meet: Ints
    meets: Ints
    first_sum: Ints
    sums: Ints
    sum_ranks: Ints
    sum_seconds: Floats
    ahead: int
    sharing: Sharing


class Queue(NamedTuple):
    """Requests for shared links, and who waits for them.

    time, entry: a heap of requests, by time and then by entry: a SEND or a copy; behind all entries, a sum.
    news: pipes, and behind them lanes of ranks, to which something has come.  size: of the heap, of `news`.
    asked, noted: per pipe, then per lane of each rank, whether its next one is in the heap, and whether it is
    in `news`.  free: when each shared link is free.
    issued: per copy when its rank came to it, -1 before.  copied: whether it has its times.  head: by (rank,
    lane) the next copy, or -1.  awaited: per rank the copy that it waits for; -1 none, -2 all.
    """

    time: Floats
    entry: Longs
    news: Longs
    size: Longs
    asked: Bools
    noted: Bools
    free: Floats
    issued: Floats
    copied: Bools
    head: Longs
    awaited: Longs


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
    queue: Queue


STREAMS = 5
"""Computing, and those that run beside it."""
NOT_YET = -1.0


def new_state(layout: Layout, begin_s: Floats, *, starts: bool = True) -> State:
    """Everything before the first event.

    begin_s: when each rank starts.  starts: whether to note when entries start. Where nothing meets others or
    runs beside computing, each starts when the one before it in its row ends, so that need not be stored.
    """
    entries, ranks, pipes = len(layout.kind), len(begin_s), len(layout.target)
    sums, meeting = len(layout.sum_ranks), len(layout.first_meet)
    return State(
        start=np.zeros(entries if starts else 0),
        end=np.zeros(entries),
        move_start=np.zeros(len(layout.route)),
        move_end=np.zeros(len(layout.route)),
        at=layout.offsets[:-1].copy(),
        clock=begin_s.astype(np.float64),
        awaited=np.full(ranks, -1),
        part=np.zeros(ranks, np.int64),
        behind=np.full(ranks, -1),
        streams=np.zeros((ranks, STREAMS)),
        counts=np.zeros((pipes, 4), np.int64),
        free=np.zeros(pipes),
        sum_at=np.zeros(sums),
        sum_here=np.zeros(sums, np.int64),
        sum_waiter=np.full(sums, -1),
        meet_at=np.full(meeting, NOT_YET),
        meet_waiter=np.full(meeting, -1),
        stack=np.arange(ranks)[::-1].copy(),
        ready=np.array([ranks]),
        queue=_new_queue(layout.sharing, pipes),
    )


def _new_queue(sharing: Sharing, pipes: int) -> Queue:
    copies, ranks = len(sharing.next_copy), len(sharing.lanes)
    room = pipes + COPY_LANES * ranks + len(sharing.first_gate) if sharing.links else 0
    return Queue(
        time=np.zeros(room),
        entry=np.zeros(room, np.int64),
        news=np.zeros(room, np.int64),
        size=np.zeros(2, np.int64),
        asked=np.zeros(room, np.bool_),
        noted=np.zeros(room, np.bool_),
        free=np.zeros(sharing.links),
        issued=np.full(copies, NOT_YET),
        copied=np.zeros(copies, np.bool_),
        head=sharing.first_copy.astype(np.int64),
        awaited=np.full(ranks, -1),
    )
