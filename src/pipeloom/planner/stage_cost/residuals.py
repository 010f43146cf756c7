"""The residuals of one stage: what each would take to make again, and what the stage holds if some are.

The chain of a residual is the ops that run again to make it: from the residual back to other residuals, to
what the stage received or the batch. It crosses ops whose results are not kept, but no op that draws random
numbers or depends on a buffer that changes. As a chain ends at every residual, whatever becomes of that, the
chains of several are those of each together, each op once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...ir.kernels import kernel
from .arrays import Array, Indices, RaggedArray
from .liveness import ForwardArrays, LivenessSweep

LONGEST = 64
"""Ops of a chain; what would take more is kept or offloaded."""

KEEP, RECOMPUTE, OFFLOAD = 0, 1, 2
"""What becomes of a residual: entries of a choice."""

_FREE, _NEEDS_INPUT, _STUCK = 0, 1, 2


@kernel
def _chains(
    start: int,
    end: int,
    forward: ForwardArrays,
    owned: tuple[Indices, NDArray[np.bool_]],
    found: tuple[Indices, Indices, Indices, Indices],
    marks: tuple[Indices, Indices],
) -> int:
    """Write the chain of each residual, and whether it can be made again. Returns the length of all."""
    reads_first, reads, made = forward.reads_first, forward.reads, forward.made
    saver, fixed = owned
    wanted, state, first, ops = found
    seen, pending = marks
    length = 0
    for index in range(len(wanted)):
        first[index] = length
        state[index] = _FREE
        count = 0
        if made[wanted[index]] >= 0:
            pending[0] = made[wanted[index]]
            seen[pending[0]] = index
            count = 1
        while count > 0 and state[index] < _STUCK:
            count -= 1
            p = pending[count]
            if fixed[p] or length - first[index] >= LONGEST:
                state[index] = _STUCK
                break
            ops[length] = p
            length += 1
            for k in range(reads_first[p], reads_first[p + 1]):
                s = reads[k]
                if made[s] < 0:
                    continue
                if made[s] < start or made[s] >= end:
                    state[index] = _NEEDS_INPUT
                elif saver[s] < 0 and seen[made[s]] != index:
                    seen[made[s]] = index
                    pending[count] = made[s]
                    count += 1
        if state[index] == _STUCK:
            length = first[index]
    first[len(wanted)] = length
    return length


@kernel
def _most_again(ops: Indices, forward: ForwardArrays, again: NDArray[np.bool_], until: Indices) -> float:
    """The most that running ops (ascending) again needs besides what they are run for.

    again: whether a storage is one of those.  until: room for the last of the ops that reads a storage.
    """
    reads_first, reads = forward.reads_first, forward.reads
    makes_first, makes = forward.makes_first, forward.makes
    extra, size, scratch = forward.extra, forward.size, forward.scratch
    for p in ops:
        for k in range(makes_first[p], makes_first[p + 1]):
            until[makes[k]] = -1
        for k in range(reads_first[p], reads_first[p + 1]):
            until[reads[k]] = -1
    for p in ops:
        for k in range(makes_first[p], makes_first[p + 1]):
            until[makes[k]] = p
        for k in range(reads_first[p], reads_first[p + 1]):
            until[reads[k]] = max(p, until[reads[k]]) if until[reads[k]] >= 0 else -1
    level = 0.0
    most = 0.0
    for p in ops:
        for k in range(makes_first[p], makes_first[p + 1]):
            if not again[makes[k]]:
                level += size[makes[k]]
        most = max(most, level + scratch[p] + extra[p])
        for k in range(makes_first[p], makes_first[p + 1]):
            if not again[makes[k]] and until[makes[k]] == p:
                level -= size[makes[k]]
        for k in range(reads_first[p], reads_first[p + 1]):
            if not again[reads[k]] and until[reads[k]] == p:
                level -= size[reads[k]]
    return most


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Those of one stage that a planner can name.

    names, storage, size: of each.  chain: the ops of each (see the module), as positions from the stage's
    first op.
    seconds: of its ops' forwards, by op.  besides: seconds of the cheap ops in each chain.
    top: the last op that saves each, likewise a position from the stage's first.
    may: whether each can be made again.  needs_input: whether for that something is needed that the stage
    received.
    """

    names: tuple[str, ...]
    storage: Indices
    size: Array
    chain: RaggedArray
    seconds: Array
    besides: Array
    top: Indices
    may: NDArray[np.bool_]
    needs_input: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.size)

    @property
    def alone_s(self) -> Array:
        """Seconds that making each again takes, by itself."""
        begun = np.concatenate([[0.0], np.cumsum(self.seconds[self.chain.items])])
        alone: Array = begun[self.chain.first[1:]] - begun[self.chain.first[:-1]] + self.besides
        return alone

    def chosen_ops(self, choice: Indices) -> Indices:
        """The ops that run again, ascending."""
        again = np.zeros(len(self.seconds), dtype=np.bool_)
        again[self.chain.items[(choice == RECOMPUTE)[self._chain_of]]] = True
        return np.flatnonzero(again)

    @cached_property
    def _chain_of(self) -> Indices:
        """The residual to whose chain each of `chain.items` belongs."""
        return np.repeat(np.arange(len(self)), np.diff(self.chain.first))

    def recompute_s(self, choice: Indices) -> float:
        """Seconds that running them takes."""
        again = choice == RECOMPUTE
        return float(self.seconds[self.chosen_ops(choice)].sum() + self.besides[again].sum())


def find_residuals(
    sweep: LivenessSweep, start: int, end: int, seconds: Array, besides: Array, inputs_kept: bool
) -> Residuals:
    """The residuals of ops [start, end).

    seconds: of the forward of each op of the interval.  besides: of each storage, those of cheap ops that
    make it.  inputs_kept: the stage keeps what it received for its backward.
    """
    tensors = sweep.tensors
    _, saver, _ = sweep.moments(start, end)
    saves = tensors.saves
    touched = np.unique(saves.items[saves.first[start] : saves.first[end]])
    own = [s for s in touched.tolist() if saver[s] >= 0 and tensors.residuals[s]]
    wanted = np.array(own, dtype=np.int64)
    state, first = np.zeros(len(own), np.int64), np.zeros(len(own) + 1, np.int64)
    ops = np.zeros(LONGEST * len(own) + 1, np.int64)
    marks = np.full(len(tensors), -1, np.int64), np.zeros(len(tensors), np.int64)
    count = _chains.form(end - start)(
        start, end, sweep.forward, (saver, tensors.fixed), (wanted, state, first, ops), marks
    )
    top = np.zeros(len(tensors.size), np.int64)
    top[saves.items[saves.first[start] : saves.first[end]]] = np.repeat(
        np.arange(end - start), np.diff(saves.first[start : end + 1])
    )
    return Residuals(
        names=tuple(tensors.residuals[s] for s in own),
        storage=wanted,
        size=tensors.size[wanted],
        chain=RaggedArray(first, ops[:count] - start),
        seconds=seconds,
        besides=besides[wanted],
        top=top[wanted],
        may=state < (_STUCK if inputs_kept else _NEEDS_INPUT),
        needs_input=state == _NEEDS_INPUT,
    )


def recompute_ahead_bytes(sweep: LivenessSweep, residuals: Residuals, start: int, choice: Indices) -> float:
    """The most that running all chains at once needs besides what they are run for."""
    again = np.zeros(len(sweep.tensors.size), dtype=np.bool_)
    again[residuals.storage[choice == RECOMPUTE]] = True
    ops = residuals.chosen_ops(choice) + start
    room = np.zeros(len(again), np.int64)
    return float(_most_again.form(len(ops))(ops, sweep.forward, again, room))


def encode_treatments(residuals: Residuals, treatments: Mapping[str, str]) -> Indices:
    """A choice from treatments by name. Names of other stages are passed over."""
    number = {"keep": KEEP, "recompute": RECOMPUTE, "offload": OFFLOAD}
    return np.array([number[treatments.get(n, "keep")] for n in residuals.names], dtype=np.int64)
