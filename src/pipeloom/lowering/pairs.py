"""Pairs: what both actions wait for comes in front of the pair, and what both send behind it.

RECV_F 2F5 SEND_F RECV_B 1B3 SEND_B   ->   RECV_F RECV_B 2F5&1B3 SEND_F SEND_B
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.action import Action, Instruction, Transfer
from ..ir.schedule import Program
from ..ir.stages import StageGraph


def join_pairs(program: Program, stages: StageGraph) -> Program:
    """Close up each pair, whose transfers `add_transfers` has put next to each action."""
    if not program.pairs:
        return program
    second = dict(program.pairs)
    return replace(program, rows=tuple(_closed_up(row, second) for row in program.rows))


def _closed_up(row: tuple[Instruction, ...], second: dict[Action, Action]) -> tuple[Instruction, ...]:
    made: list[Instruction] = []
    at = 0
    while at < len(row):
        step = row[at]
        partner = second.get(step) if isinstance(step, Action) else None
        if partner is None:
            made.append(step)
            at += 1
            continue
        end = row.index(partner, at)
        between = [t for t in row[at + 1 : end] if isinstance(t, Transfer)]
        made += [t for t in between if not t.sends]
        made += [step, partner]
        made += [t for t in between if t.sends]
        at = end + 1
    return tuple(made)
