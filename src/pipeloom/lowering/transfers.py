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
    Columns,
    Ints,
    Rows,
    starts_of,
)
from ..ir.flow import Flow, flow_of
from ..ir.message_index import on_other_ranks
from ..ir.schedule import Program
from ..ir.stages import StageGraph


def add_transfers(program: Program, stages: StageGraph) -> Program:
    old, count = program.columns, len(program.placement)
    around = _around(flow_of(stages), program.placement)
    row = np.where(old.kind == F_, old.stage, count + old.stage)
    moves = old.among((F_, B_, I_))
    before, after = (
        np.where(moves, np.diff(first)[row], 0) for first in (around.first_before, around.first_after)
    )
    # What an action receives stands in front of it, what it sends behind it. For 1F0, which receives one
    # message and sends two:
    #
    #     made    RECV_F  1F0  SEND_F  SEND_F
    #     at        -1     0      1       2
    #
    ends = np.append(0, np.cumsum(before + 1 + after))
    entry = np.repeat(np.arange(len(old)), np.diff(ends))
    at = np.arange(len(entry)) - (ends[:-1] + before)[entry]
    kind, peer = old.kind[entry], np.full(len(entry), -1, np.int32)
    receives, sends = np.flatnonzero(at < 0), np.flatnonzero(at > 0)
    peer[receives] = around.before[around.first_before[row[entry[receives]] + 1] + at[receives]]
    peer[sends] = around.after[around.first_after[row[entry[sends]]] + at[sends] - 1]
    kind[receives] = np.where(kind[receives] == F_, RECV_F_, RECV_B_)
    kind[sends] = np.where(kind[sends] == F_, SEND_F_, SEND_B_)
    columns = Columns(
        kind=kind,
        stage=old.stage[entry],
        microbatch=old.microbatch[entry],
        peer=peer,
        offsets=ends[old.offsets],
        kinds=old.kinds,
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
