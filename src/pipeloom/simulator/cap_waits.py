"""Cap waits: which copies to the host an action waits for so that its rank keeps its cap.

The rule is that of the runtime (`runtime.worker.Worker.run`). When a rank comes to an action that
together with what is there would take more than the cap, it first waits for OFFLOADs that it has come to and
that are still going on, the oldest first, until the action fits or none is left. Those always end, so nothing
blocks; what does not fit even then passes the cap.

    cap      -----------------------------.
    held     F0 F1 |        wait        | F2 ...        F2 would pass the cap
    d2h            |-OFFLOAD0-|-OFFLOAD1-|              OFFLOAD0 frees too little, OFFLOAD1 enough

What is there at that moment depends on the times of copies and of messages, and these on the waits. So a
program is run again and again, each time with the waits that follow from the times before. All waits up to
the first one that differs are right, and with them the times up to there, so each run settles one more of
them, and usually all that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..ir.columns import (
    B_,
    F_,
    I_,
    OFFLOAD_,
    RECOMPUTE_,
    RECV_B_,
    RECV_F_,
    REDUCE_,
    RELOAD_,
    SEND_B_,
    SEND_F_,
    STEP_,
    W_,
    Ints,
    Longs,
)
from ..ir.kernels import kernel
from ..ir.schedule import Program
from .loop_state import Floats, Layout
from .memory import Memory
from .memory_changes import MemoryChanges
from .memory_replay import BOUNDARY, RESIDUALS, TRANSIENT, Step, sent_messages

ROUNDS = 8
"""After so many runs waits are only added, so that it ends soon however they depend on each other."""


class RankCopies(NamedTuple):
    """A rank, and what it offloads.

    rank, static, cap: the rank, its static bytes and its cap in bytes.
    offloads: entries of its OFFLOADs, in order.  number: (entries,), the number of an OFFLOAD there.
    offload_of: (entries,), the OFFLOAD of a RELOAD, else -1.  size: (stages,), bytes that OFFLOAD copies.
    """

    rank: int
    static: int
    cap: int
    offloads: Longs
    number: Longs
    offload_of: Ints
    size: Longs


class SentMessages(NamedTuple):
    """The messages of a rank, by time.  time: when each is through, in seconds.  size: its bytes."""

    time: Floats
    size: Longs


class Receives(NamedTuple):
    """(channels,): messages posted and received so far."""

    posted: Longs
    received: Longs


def next_cap_waits(program: Program, memory: Memory, caps: Sequence[int], runs: int) -> Ints:
    """Per entry the OFFLOAD that it waits for, or -1, as follows from the times of the last run.

    memory: of that run.  caps: bytes, by rank.  runs: how many there were.
    """
    layout, step = memory.layout, memory.step
    columns, index = program.columns, program.action_index
    waits = np.full(len(columns), -1, np.int32)
    offload_of = np.full(len(columns), -1, np.int32)
    away, back = index.of(OFFLOAD_), index.of(RELOAD_)
    both = (away >= 0) & (back >= 0)
    offload_of[back[both]] = away[both]
    number = np.zeros(len(columns), np.int64)
    for rank, static in enumerate(memory.static):
        low, high = columns.offsets[rank : rank + 2].tolist()
        offloads = low + np.flatnonzero(columns.kind[low:high] == OFFLOAD_)
        if not len(offloads):
            continue
        number[offloads] = np.arange(len(offloads))
        copies = RankCopies(rank, sum(static), caps[rank], offloads, number, offload_of, memory.offloaded)
        channels = len(layout.target)
        receives = Receives(np.zeros(channels, np.int64), np.zeros(channels, np.int64))
        _find_waits(step, copies, SentMessages(*sent_messages(step, rank)), receives, waits)
    return np.maximum(waits, layout.cap_wait) if runs > ROUNDS and len(layout.cap_wait) else waits


@kernel
def _find_waits(step: Step, copies: RankCopies, sent: SentMessages, receives: Receives, waits: Ints) -> None:
    """Go through a rank's row, and fill in what its actions wait for.

    receives: all zero at first.
    """
    p, s, b = step
    rank, level = copies.rank, copies.static
    clock, at_sent, at_lent = b.begin_s[rank], 0, b.lent.first[rank]
    ended, begun = 0, 0  # OFFLOADs that are known to have ended, and those that the rank has come to
    for at in range(b.first_in[rank], b.first_in[rank + 1]):
        level += _posted_bytes(step, b.channels_in[at], p.receive_ahead, receives)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code, stage = p.kind[entry], p.stage[entry]
        while at_sent < len(sent.time) and sent.time[at_sent] <= clock:
            level -= sent.size[at_sent]
            at_sent += 1
        while at_lent < b.lent.first[rank + 1] and b.lent.time[at_lent] <= clock:
            level += b.lent.size[at_lent]
            at_lent += 1
        while ended < begun and s.end[copies.offloads[ended]] <= clock:
            level -= _freed_bytes(p, copies, copies.offloads[ended], entry)
            ended += 1
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            channel = p.channel[p.route[message]]
            level += _posted_bytes(step, channel, message - p.first_message[channel] + 1, receives)
            receives.received[channel] += 1
            level += _posted_bytes(step, channel, receives.received[channel] + p.receive_ahead, receives)
            clock = s.end[entry]
            continue
        if code == SEND_F_ or code == SEND_B_ or code == REDUCE_ or code == STEP_:
            clock = s.end[entry]
            continue
        if code == OFFLOAD_:
            begun += 1
            continue
        if _waits_for_room(code):
            need = _taken_bytes(b, entry, stage, code)
            if code == RELOAD_:
                need = copies.size[stage] if copies.number[copies.offload_of[entry]] < ended else 0
            while ended < begun and level + need > copies.cap:
                offload = copies.offloads[ended]
                level -= _freed_bytes(p, copies, offload, entry)
                if p.blocks[offload] == entry:
                    need = copies.size[stage]
                waits[entry] = offload
                ended += 1
                clock = max(clock, s.end[offload])
            if code == RELOAD_:
                level += need
                continue
        for part in (RESIDUALS, BOUNDARY):
            level += b.begin[stage, code, part] + b.finish[stage, code, part]
        level -= _dropped_bytes(b, entry, stage)
        if not p.stream[code]:
            clock = s.end[entry]


@kernel
def _waits_for_room(code: int) -> bool:
    """Whether actions of a kind wait where they would pass the cap: not those that a schedule adds."""
    computes = code == F_ or code == B_ or code == I_ or code == W_
    return computes or code == RECOMPUTE_ or code == RELOAD_


@kernel
def _freed_bytes(p: Layout, copies: RankCopies, offload: int, entry: int) -> int:
    """Bytes that are gone once an OFFLOAD has ended: none if its RELOAD stands before the entry, as it then
    goes on at once."""
    return int(copies.size[p.stage[offload]]) if p.blocks[offload] >= entry else 0


@kernel
def _taken_bytes(b: MemoryChanges, entry: int, stage: int, code: int) -> int:
    """Bytes that a compute action takes while it runs."""
    taken = b.begin[stage, code, RESIDUALS] + b.begin[stage, code, BOUNDARY] + b.begin[stage, code, TRANSIENT]
    return int(taken) - _dropped_bytes(b, entry, stage)


@kernel
def _dropped_bytes(b: MemoryChanges, entry: int, stage: int) -> int:
    """What an F leaves to a RECOMPUTE."""
    return int(b.dropped[stage]) if len(b.drops) and b.drops[entry] else 0


@kernel
def _posted_bytes(step: Step, channel: int, upto: int, receives: Receives) -> int:
    """Bytes of the receives that a rank posts, until `upto` messages of a channel have one."""
    p, _, b = step
    until, size = min(upto, p.first_message[channel + 1] - p.first_message[channel]), 0
    while receives.posted[channel] < until:
        size += b.message_bytes[p.route[p.first_message[channel] + receives.posted[channel]]]
        receives.posted[channel] += 1
    return int(size)
