"""Transfers between ranks: a message leaves as soon as it is made, and is waited for as late as possible.

    F:       RECV_F from each stage it reads,   F,       SEND_F to each stage that reads it
    B or I:  RECV_B from each reader,           B or I,  SEND_B to each stage it read from

Only for neighbours on another rank, and backward only along edges that carry gradients. With several
targets the one that comes first in its direction is served first: it is the first to wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..ir.action import Action
from ..ir.columns import (
    B_,
    F_,
    I_,
    RECV_B_,
    RECV_F_,
    SEND_B_,
    SEND_F_,
    Codes,
    Columns,
    Ints,
    Longs,
    Rows,
    starts_of,
)
from ..ir.flow import Flow, flow_of
from ..ir.kernels import kernel
from ..ir.message_index import on_other_ranks
from ..ir.schedule import Program
from ..ir.stages import StageGraph


def add_transfers(program: Program, stages: StageGraph) -> Program:
    old = program.columns
    around = _around(flow_of(stages), program.placement)
    count = len(program.placement)
    extra = np.zeros((count, len(old.kinds)), np.int32)
    sizes = np.diff(around.first_before) + np.diff(around.first_after)
    extra[:, F_] = sizes[:count]
    extra[:, B_] = extra[:, I_] = sizes[count:]
    total = len(old) + int(extra[old.stage, old.kind].sum())
    kind = np.empty(total, np.int16)
    stage, microbatch, peer = (np.full(total, -1, np.int32) for _ in range(3))
    offsets = np.zeros(len(old.offsets), np.int64)
    made = (kind, stage, microbatch, peer)
    _insert((old.kind, old.stage, old.microbatch), old.offsets, around, made, offsets)
    columns = Columns(
        kind=kind, stage=stage, microbatch=microbatch, peer=peer, offsets=offsets, kinds=old.kinds
    )
    return replace(program, rows=Rows(columns))


class _Around(NamedTuple):
    """Far neighbours, first of F of each stage, then of B or I of each stage: the stages that send to row r
    are `before[first_before[r] : first_before[r + 1]]`; `after` has those that it sends to."""

    first_before: Ints
    before: Ints
    first_after: Ints
    after: Ints


def _around(flow: Flow, placement: tuple[int, ...]) -> _Around:
    def listed(forward: tuple[tuple[int, ...], ...], back: tuple[tuple[int, ...], ...]) -> tuple[Ints, Ints]:
        rows = [on_other_ranks(placement, s, peers) for s, peers in enumerate(forward)]
        rows += [on_other_ranks(placement, s, peers)[::-1] for s, peers in enumerate(back)]
        return starts_of([len(row) for row in rows]), np.array([p for row in rows for p in row], np.int32)

    first_before, before = listed(flow.reads_from, flow.gradients_from)
    first_after, after = listed(flow.read_by, flow.gradients_to)
    return _Around(first_before=first_before, before=before, first_after=first_after, after=after)


@kernel
def _insert(
    old: tuple[Codes, Ints, Ints],
    offsets: Longs,
    around: _Around,
    made: tuple[Codes, Ints, Ints, Ints],
    made_offsets: Longs,
) -> None:
    kind, stage, microbatch = old
    first_before, before, first_after, after = around
    made_kind, made_stage, made_microbatch, made_peer = made
    stages = (len(first_before) - 1) // 2
    at = 0
    for rank in range(len(offsets) - 1):
        for entry in range(offsets[rank], offsets[rank + 1]):
            code, s = kind[entry], stage[entry]
            row = s if code == F_ else stages + s
            moves = code == F_ or code == B_ or code == I_
            low = at
            if moves:
                for b in range(first_before[row], first_before[row + 1]):
                    made_kind[at] = RECV_F_ if code == F_ else RECV_B_
                    made_peer[at] = before[b]
                    at += 1
            made_kind[at] = code
            at += 1
            if moves:
                for a in range(first_after[row], first_after[row + 1]):
                    made_kind[at] = SEND_F_ if code == F_ else SEND_B_
                    made_peer[at] = after[a]
                    at += 1
            for e in range(low, at):
                made_stage[e] = s
                made_microbatch[e] = microbatch[entry]
        made_offsets[rank + 1] = at


def join_pairs(program: Program, stages: StageGraph) -> Program:
    """What both actions of a pair wait for comes in front of it, and what both send behind it.

    RECV_F 2F5 SEND_F RECV_B 1B3 SEND_B   ->   RECV_F RECV_B 2F5&1B3 SEND_F SEND_B
    """
    if not program.pairs:
        return program
    second: dict[Action, Action] = dict(program.pairs)
    rows = []
    for row in program.rows:
        made: list[Action] = []
        at = 0
        while at < len(row):
            end = row.index(second[row[at]], at) if row[at] in second else at
            between = row[at + 1 : end]
            made += [step for step in between if step.receives]
            made += [row[at], row[end]] if end > at else [row[at]]
            made += [step for step in between if step.sends]
            at = end + 1
        rows.append(tuple(made))
    return replace(program, rows=tuple(rows))
