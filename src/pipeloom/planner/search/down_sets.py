"""Down-sets of a graph of pieces: what may lie in front of a cut, whatever branches there are.

A down-set holds with each piece all that this one reads. What a down-set has and a smaller one within it has
not is a convex set, so a chain of stages is a chain of down-sets. An antichain, pieces of which none depends
on another, says the same as the down-set that it ends: there are as many of one as of the other.

Of k towers of n layers side by side there are (n + 1)^k: 6,561 for 4 towers of 8, 78,125 for 7 of 4.

    a1 -- a2 --.          down-sets    {}    {a1}    {a1 b1}    {a1 b1 b2}    all
                join      stages          a1      b1         b2           a2 join
    b1 -- b2 --'

A down-set is an int whose bit p says whether it has piece p: x & ~y == 0 says that x lies within y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from ...ir.errors import PlanError
from ..stage_cost.tensors import Array, Indices

Row: TypeAlias = Callable[[int, Indices], Array]
"""(number of a down-set, numbers of such within it) -> values of the stages between: (ranks, sets)."""


@dataclass(frozen=True)
class PieceGraph:
    """Pieces in a topological order, and what they cost for one micro-batch.

    seconds: forward and backward.  held_bytes: residuals of a micro-batch.  state_bytes: parameters with
    their gradients and optimizer states.  values: (piece that makes it, pieces that read it, bytes), of each
    value that another piece reads.
    """

    seconds: tuple[float, ...]
    held_bytes: tuple[float, ...]
    state_bytes: tuple[float, ...]
    values: tuple[tuple[int, tuple[int, ...], float], ...]

    @property
    def edges(self) -> set[tuple[int, int]]:
        return {(maker, reader) for maker, readers, _ in self.values for reader in readers}


class DownSets:
    """All down-sets of a graph of pieces, by size; the first is empty, the last has all.

    Raises: PlanError if there are more than `most`.
    """

    def __init__(self, graph: PieceGraph, most: int) -> None:
        self.graph = graph
        pieces = len(graph.seconds)
        reads, readers = [0] * pieces, [list[int]() for _ in range(pieces)]
        for maker, reader in graph.edges:
            reads[reader] |= 1 << maker
            readers[maker].append(reader)
        # Each gets one more piece, behind all that it has, so that it is listed once. ready: of each, pieces
        # outside that read nothing outside.
        masks, ready = [0], [sum(1 << p for p in range(pieces) if not reads[p])]
        for number, held in enumerate(masks):
            behind = ready[number] >> held.bit_length() << held.bit_length()
            while behind:
                piece = behind & -behind
                behind ^= piece
                grown = held | piece
                freed = (r for r in readers[piece.bit_length() - 1] if not reads[r] & ~grown)
                masks.append(grown)
                ready.append((ready[number] ^ piece) | sum(1 << r for r in freed))
            if len(masks) > most:
                raise PlanError(
                    f"{pieces} pieces have more than {most:,} down-sets, where this planner stops",
                    hint="use planner graphpipe or exact, or pieces that are layers and not ops",
                )
        self.masks = sorted(masks, key=lambda held: (held.bit_count(), held))
        self.sizes = np.array([held.bit_count() for held in self.masks])
        self.members = np.array([[held >> p & 1 for p in range(pieces)] for held in self.masks], np.float64)
        words = -(-pieces // 64)
        # The same bits in columns of 64, so that numpy compares one down-set with all smaller ones at once.
        self._words = np.array(
            [[held >> 64 * w & (1 << 64) - 1 for w in range(words)] for held in self.masks], np.uint64
        )

    def __len__(self) -> int:
        return len(self.masks)

    def within(self, number: int) -> Indices:
        """Numbers of the down-sets that are part of one, without itself."""
        smaller = int(np.searchsorted(self.sizes, self.sizes[number]))
        outside = self._words[:smaller] & ~self._words[number]
        return np.nonzero(~outside.any(axis=1))[0]

    def total(self, of_pieces: Sequence[float]) -> Array:
        """Per down-set the sum over its pieces."""
        return np.asarray(self.members @ np.array(of_pieces))

    @cached_property
    def leaving_bytes(self) -> Array:
        """Per down-set the bytes of values made in it and read outside, each once."""
        sums = np.zeros(len(self))
        for maker, readers, size in self.graph.values:
            left_out = (self.members[:, list(readers)] == 0).any(axis=1)
            sums += size * (self.members[:, maker] * left_out)
        return sums

    @cached_property
    def traffic(self) -> Array:
        """[piece, piece] bytes of the messages from one to the other."""
        count = len(self.graph.seconds)
        found = np.zeros((count, count))
        for maker, readers, size in self.graph.values:
            for reader in readers:
                found[maker, reader] += size
        return found

    def message_bytes(self, number: int, within: Indices) -> Array:
        """Bytes of all messages into the stages between a down-set and such within it, and out of them.

        With x and y the members of the smaller and the larger one and E the traffic, the stage reads
        x E (y - x) and is read by (y - x) E (1 - y).
        """
        y, x = self.members[number], self.members[within]
        x_in_y = (x @ self.traffic) @ y
        read = x_in_y - np.einsum("ij,ij->i", x @ self.traffic, x)
        made = y @ self.traffic.sum(axis=1) - x @ self.traffic.sum(axis=1)
        return np.asarray(read + made - (y @ self.traffic @ y - x_in_y))


def best_chain(sets: DownSets, stages: int, row: Row) -> tuple[float, tuple[int, ...]]:
    """The chain of down-sets, from the empty one to all, whose stages' largest value is least.

    Time: pairs of down-sets, one within the other, x stages.  Returns: the value and stages + 1 numbers of
    down-sets; (inf, ()) if there is none.
    """
    # best[s + 1][Y] = min over X within Y of  max(best[s][X], value_s(Y - X)), for all s in one go. Down-sets
    # are sorted by size, so that all within one come before it.
    best = np.full((stages + 1, len(sets)), np.inf)
    best[0, 0] = -np.inf
    origin = np.zeros((stages + 1, len(sets)), np.int64)
    for number in range(1, len(sets)):
        inner = sets.within(number)
        values = np.maximum(best[:-1, inner], row(number, inner))
        least = values.argmin(axis=1)
        best[1:, number] = values[np.arange(stages), least]
        origin[1:, number] = inner[least]
    if not best[stages, -1] < np.inf:
        return np.inf, ()
    chain = [len(sets) - 1]
    for stage in range(stages, 0, -1):
        chain.append(int(origin[stage, chain[-1]]))
    return float(best[stages, -1]), tuple(reversed(chain))
