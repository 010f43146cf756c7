"""Transfers between ranks: a message leaves as soon as it is made, and is waited for as late as possible.

    F:       RECV_F from each stage it reads,   F,       SEND_F to each stage that reads it
    B or I:  RECV_B from each reader,           B or I,  SEND_B to each stage it read from

Only for neighbours on another rank, and backward only along edges that carry gradients. With several
targets the one that comes first in its direction is served first: it is the first to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..ir.action import RECV_B, RECV_F, SEND_B, SEND_F, Action, B, F, I, Instruction, Kind, Transfer
from ..ir.flow import Flow, flow_of
from ..ir.schedule import Program
from ..ir.stages import StageGraph


def add_transfers(program: Program, stages: StageGraph) -> Program:
    """Put each compute action between the messages it needs and those it makes."""
    flow = flow_of(stages)
    rows = tuple(tuple(_with_messages(row, flow, program.placement)) for row in program.rows)
    return replace(program, rows=rows)


def _with_messages(
    row: Iterable[Instruction], flow: Flow, placement: tuple[int, ...]
) -> Iterator[Instruction]:
    for step in row:
        before, after = _messages(step, flow) if isinstance(step, Action) else ([], [])
        yield from (m for m in before if placement[m.peer] != placement[m.stage])
        yield step
        yield from (m for m in after if placement[m.peer] != placement[m.stage])


def _messages(action: Action, flow: Flow) -> tuple[list[Transfer], list[Transfer]]:
    """What an action waits for and what it sends, as if every stage had its own rank."""

    def along(kind: Kind, peers: Iterable[int]) -> list[Transfer]:
        return [Transfer(action.stage, kind, action.microbatch, peer) for peer in peers]

    stage = action.stage
    if action.kind == F:
        return along(RECV_F, flow.reads_from[stage]), along(SEND_F, flow.read_by[stage])
    if action.kind in (B, I):
        before = along(RECV_B, reversed(flow.gradients_from[stage]))
        return before, along(SEND_B, reversed(flow.gradients_to[stage]))
    return [], []
