"""Coarser pieces than ops: the repeated layers of a model, and the runs of ops that one module's call makes.

A layer is what one entry of a numbered container makes: `model.layers.3` of a Llama, `encoder.block.0` of a
T5. What stands before, between and behind them (embeddings, the head and the loss) is a piece of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.graph import Op

_NUMBERED = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


@dataclass(frozen=True)
class Piece:
    """Ops [start, end) by position. layer: the FQN of the repeated layer, "" for what is between layers."""

    start: int
    end: int
    layer: str = ""


def layer_of(module: str) -> str:
    """The outermost entry of a numbered container that a module is, or is in; "" if it is in none.

    >>> layer_of("model.layers.3.self_attn.q_proj"), layer_of("0.1"), layer_of("lm_head")
    ('model.layers.3', '0', '')
    """
    found = _NUMBERED.match(module)
    return found.group() if found else ""


def layers(ops: Sequence[Op]) -> list[Piece]:
    """The ops in pieces, each a layer or what is between two.

    What stands within a layer and is of an earlier one, or of none, belongs to it. A model without numbered
    containers has one piece per call of a module; one without modules one per op.
    """
    names = [layer_of(op.module) for op in ops]
    if not any(names):
        return calls(ops)
    final = {name: index for index, name in enumerate(names)}
    own: list[str] = []
    begun: set[str] = {""}
    current = ""
    for index, name in enumerate(names):
        if name not in begun:
            begun.add(name)
            current = name
        elif not name and current and index > final[current]:
            current = ""
        own.append(current)
    starts = [index for index in range(len(ops)) if index == 0 or own[index] != own[index - 1]]
    ends = [*starts[1:], len(ops)]
    return [Piece(start, end, own[start]) for start, end in zip(starts, ends, strict=True)]


def calls(ops: Sequence[Op]) -> list[Piece]:
    """One piece per call of a module: consecutive ops of one innermost module; per op without modules."""
    pieces: list[Piece] = []
    start = 0
    for index in range(1, len(ops) + 1):
        if index == len(ops) or ops[index].module != ops[start].module or not ops[start].module:
            pieces.append(Piece(start, index, ops[start].module))
            start = index
    return pieces


def borders(pieces: Sequence[Piece], allowed: Sequence[int]) -> list[int]:
    """Where pieces begin, of the positions in which cuts are allowed, and both ends."""
    starts = {piece.start for piece in pieces}
    return [position for position in allowed if position in starts | {allowed[0], allowed[-1]}]
