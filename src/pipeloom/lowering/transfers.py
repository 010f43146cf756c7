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
    old, around = program.columns, _around(flow_of(stages), program.placement)
    count = len(program.placement)
    added = np.zeros((count, len(old.kinds)), np.int32)
    transfers = np.diff(around.first_before) + np.diff(around.first_after)
    added[:, F_] = transfers[:count]
    added[:, B_] = added[:, I_] = transfers[count:]
    total = len(old) + int(added[old.stage, old.kind].sum())
    made = Columns(
        kind=np.empty(total, np.int16),
        stage=np.empty(total, np.int32),
        microbatch=np.empty(total, np.int32),
        peer=np.full(total, -1, np.int32),
        offsets=np.zeros_like(old.offsets),
        kinds=old.kinds,
    )
    columns = (made.kind, made.stage, made.microbatch, made.peer)
    _insert((old.kind, old.stage, old.microbatch), old.offsets, around, columns, made.offsets)
    return replace(program, rows=Rows(made))


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
    made_kind, made_stage, made_microbatch, made_peer = made
    stages = len(around.first_before) // 2
    at = 0
    for rank in range(len(offsets) - 1):
        for entry in range(offsets[rank], offsets[rank + 1]):
            code, low = kind[entry], at
            moves = code == F_ or code == B_ or code == I_
            row = stage[entry] if code == F_ else stages + stage[entry]
            if moves:
                for number in range(around.first_before[row], around.first_before[row + 1]):
                    made_kind[at] = RECV_F_ if code == F_ else RECV_B_
                    made_peer[at] = around.before[number]
                    at += 1
            made_kind[at] = code
            at += 1
            if moves:
                for number in range(around.first_after[row], around.first_after[row + 1]):
                    made_kind[at] = SEND_F_ if code == F_ else SEND_B_
                    made_peer[at] = around.after[number]
                    at += 1
            made_stage[low:at] = stage[entry]
            made_microbatch[low:at] = microbatch[entry]
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
