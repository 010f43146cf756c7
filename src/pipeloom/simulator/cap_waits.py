"""Room: which copies to the host an action waits for so that its rank keeps its cap.

The rule is that of the runtime (`runtime.residuals.Residuals.make_room`). When a rank comes to an action that
together with what is there would take more than the cap, it first waits for OFFLOADs that it has come to and
that are still going on, the oldest first, until the action fits or none is left. Those always end, so nothing
blocks; what does not fit even then passes the cap.

What is there at that moment depends on the times of copies and of messages, and these on the waits. So a
program is run again and again, each time with the waits that follow from the times before. All waits up to
the first one that differs are right, and with them the times up to there, so each run settles one more of
them, and usually all that are left.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from .loop_state import Floats, Layout, State
from .memory import Memory
from .memory_replay import BOUNDARY, RESIDUALS, TRANSIENT, Books, through

ROUNDS = 8
"""After so many runs waits are only added, so that it ends soon however they depend on each other."""


def next_room(program: Program, memory: Memory, caps: Sequence[int], runs: int) -> Ints:
    """Per entry the OFFLOAD that it waits for, or -1, as follows from the times of the last run.

    memory: of that run.  caps: bytes, by rank.  runs: how many there were.
    """
    p, s, books = memory.layout, memory.state, memory.books
    columns, index = program.columns, program.action_index
    found = np.full(len(columns), -1, np.int32)
    away_of = np.full(len(columns), -1, np.int32)
    away, back = index.of(OFFLOAD_), index.of(RELOAD_)
    has = (away >= 0) & (back >= 0)
    away_of[back[has]] = away[has]
    turn = np.zeros(len(columns), np.int64)
    for rank, static in enumerate(memory.static):
        low, high = columns.offsets[rank : rank + 2].tolist()
        leaving = low + np.flatnonzero(columns.kind[low:high] == OFFLOAD_)
        if not len(leaving):
            continue
        turn[leaving] = np.arange(len(leaving))
        pipes = np.zeros((2, len(p.target)), np.int64)
        copies = (leaving, turn, away_of, memory.offloaded)
        own = (rank, sum(static), caps[rank])
        _find((p, s, books), own, copies, through(p, s, books, rank), pipes, found)
    return np.maximum(found, p.room) if runs > ROUNDS and len(p.room) else found


@kernel
def _find(
    of: tuple[Layout, State, Books],
    own: tuple[int, int, int],
    copies: tuple[Longs, Longs, Ints, Longs],
    gone: tuple[Floats, Longs],
    pipes: Longs,
    room: Ints,
) -> None:
    """Go through a rank's row, and fill in what its actions wait for.

    own: the rank, its static bytes and its cap.  copies: its OFFLOADs in order, the place of each there, the
    OFFLOAD of each RELOAD, and by stage the bytes.  gone: when its messages are through, and their bytes.
    pipes: messages posted and received so far, zero at first.
    """
    p, s, b = of
    rank, level, cap = own
    leaving, turn, away_of, offloaded = copies
    gone_at, gone_size = gone
    clock, at_gone, at_lent = b.begin_s[rank], 0, b.lent.first[rank]
    ended, begun = 0, 0  # OFFLOADs that are known to have ended, and those that the rank has come to
    for at in range(b.first_in[rank], b.first_in[rank + 1]):
        level += _posted(p, b, (b.pipes_in[at], p.ahead), pipes)
    for entry in range(p.offsets[rank], p.offsets[rank + 1]):
        code, stage = p.kind[entry], p.stage[entry]
        while at_gone < len(gone_at) and gone_at[at_gone] <= clock:
            level -= gone_size[at_gone]
            at_gone += 1
        while at_lent < b.lent.first[rank + 1] and b.lent.time[at_lent] <= clock:
            level += b.lent.size[at_lent]
            at_lent += 1
        while ended < begun and s.end[leaving[ended]] <= clock:
            level -= _left(p, (leaving[ended], entry), offloaded)
            ended += 1
        if code == RECV_F_ or code == RECV_B_:
            message = p.message[entry]
            pipe = p.pipe[p.route[message]]
            level += _posted(p, b, (pipe, message - p.first[pipe] + 1), pipes)
            pipes[1, pipe] += 1
            level += _posted(p, b, (pipe, pipes[1, pipe] + p.ahead), pipes)
            clock = s.end[entry]
            continue
        if code == SEND_F_ or code == SEND_B_ or code == REDUCE_ or code == STEP_:
            clock = s.end[entry]
            continue
        if code == OFFLOAD_:
            begun += 1
            continue
        if _waits_for_room(code):
            need = _taken(b, entry, stage, code)
            if code == RELOAD_:
                need = offloaded[stage] if turn[away_of[entry]] < ended else 0
            while ended < begun and level + need > cap:
                away = leaving[ended]
                level -= _left(p, (away, entry), offloaded)
                if p.held[away] == entry:
                    need = offloaded[stage]
                room[entry] = away
                ended += 1
                clock = max(clock, s.end[away])
            if code == RELOAD_:
                level += need
                continue
        for part in (RESIDUALS, BOUNDARY):
            level += b.begin[stage, code, part] + b.finish[stage, code, part]
        level -= _dropped(b, entry, stage)
        if not p.stream[code]:
            clock = s.end[entry]


@kernel
def _waits_for_room(code: int) -> bool:
    """Whether actions of a kind wait where they would pass the cap: not those that a schedule adds."""
    computes = code == F_ or code == B_ or code == I_ or code == W_
    return computes or code == RECOMPUTE_ or code == RELOAD_


@kernel
def _left(p: Layout, which: tuple[int, int], offloaded: Longs) -> int:
    """Bytes that are gone once an OFFLOAD has ended: none if its RELOAD stands before the entry, as it then
    goes on at once. which: the OFFLOAD and the entry."""
    away, entry = which
    return int(offloaded[p.stage[away]]) if p.held[away] >= entry else 0


@kernel
def _taken(b: Books, entry: int, stage: int, code: int) -> int:
    """Bytes that a compute action takes while it runs."""
    taken = b.begin[stage, code, RESIDUALS] + b.begin[stage, code, BOUNDARY] + b.begin[stage, code, TRANSIENT]
    return int(taken) - _dropped(b, entry, stage)


@kernel
def _dropped(b: Books, entry: int, stage: int) -> int:
    """What an F leaves to a RECOMPUTE."""
    return int(b.dropped[stage]) if len(b.bare) and b.bare[entry] else 0


@kernel
def _posted(p: Layout, b: Books, goal: tuple[int, int], pipes: Longs) -> int:
    """Bytes of the receives that a rank posts; goal: a pipe, and how many of its messages then have one."""
    pipe, upto = goal
    until, size = min(upto, p.first[pipe + 1] - p.first[pipe]), 0
    while pipes[0, pipe] < until:
        size += b.message_bytes[p.route[p.first[pipe] + pipes[0, pipe]]]
        pipes[0, pipe] += 1
    return int(size)
