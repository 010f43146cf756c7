"""A stage's levels, op by op, with a choice of treatments: what is dropped is made again inside the backward.

Each dropped residual is made in front of the first op's backward that reads it: its chain runs there, in
the forward's order, and in front of it what the chain needs and is not there. Each op runs once, and what it
makes lives until its last reader in the backward, be that a backward or a later chain. For that a residual
that is kept, too, may have to stay longer than until the backward of its first saver.

    forward     a   b   c   d              residuals of a and d are kept, those of b and c are dropped
    backward    d'  b c  c'  b'  a'        b and c run again in front of c', the first that reads one of them;
                                           what b makes then stays for b'

With q micro-batches in flight, c = min(q, 3) of which have offloaded bytes on the device, of K bytes that
are kept and O that are offloaded:

    forward      (q - 1) K + (c - 1) O + what the newest one has made, less what it has dropped
    backward     (q - 1) K + (c - 1) O + what is left of K and O, what is made again, gradients, scratch

All figures are differences to those of the sweep that keeps everything (liveness.py), so that a choice is
weighed in a time that grows with what it drops.

The chain of a residual is the ops that run again to make it: from the residual back to other residuals, to
what the stage received or the batch. It crosses ops whose results are not kept, but no op that draws random
numbers or depends on a buffer that changes. As a chain ends at every residual, whatever becomes of that, the
chains of several are those of each together, each op once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ...ir.kernels import kernel
from ...ir.memory_policy import Treatment
from .liveness import LivenessSweep
from .tensors import Array, ForwardArrays, Indices, RaggedArray

LONGEST = 64
"""Ops of a chain; what would take more is kept or offloaded."""

KEEP, RECOMPUTE, OFFLOAD = 0, 1, 2
"""What becomes of a residual: entries of a choice."""

NAMES: tuple[Treatment, ...] = get_args(Treatment)
"""Of these, in the same order."""

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
    (reads_first, reads), made = forward.reads, forward.made
    saver, fixed = owned
    wanted, state, first, ops = found
    # A depth-first search per residual. `seen` holds the number of the last search that came by, so that it
    # need not be cleared between two: else time would grow with residuals x ops.
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
    (reads_first, reads), (makes_first, makes), _, extra, size, _, _, scratch = forward
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
    tensors, forward, saver = sweep.tensors, sweep.tensors.forward, sweep.work.saver
    sweep.of_intervals(start, np.array([end]))
    saves = forward.saves
    touched = np.unique(saves.items[saves.first[start] : saves.first[end]])
    own = [s for s in touched.tolist() if saver[s] >= 0 and tensors.residuals[s]]
    wanted = np.array(own, dtype=np.int64)
    state, first = np.zeros(len(own), np.int64), np.zeros(len(own) + 1, np.int64)
    ops = np.zeros(LONGEST * len(own) + 1, np.int64)
    marks = np.full(len(tensors.fixed), -1, np.int64), np.zeros(len(tensors.fixed), np.int64)
    count = _chains.form(end - start)(
        start, end, forward, (saver, tensors.fixed), (wanted, state, first, ops), marks
    )
    top = np.zeros(len(forward.size), np.int64)
    top[saves.items[saves.first[start] : saves.first[end]]] = np.repeat(
        np.arange(end - start), np.diff(saves.first[start : end + 1])
    )
    return Residuals(
        names=tuple(tensors.residuals[s] for s in own),
        storage=wanted,
        size=forward.size[wanted],
        chain=RaggedArray(first, ops[:count] - start),
        seconds=seconds,
        besides=besides[wanted],
        top=top[wanted],
        may=state < (_STUCK if inputs_kept else _NEEDS_INPUT),
        needs_input=state == _NEEDS_INPUT,
    )


def recompute_ahead_bytes(liveness: RecomputeLiveness, choice: Indices) -> float:
    """The most that running all chains at once needs besides what they are run for."""
    forward, residuals = liveness.sweep.tensors.forward, liveness.residuals
    again = np.zeros(len(forward.size), dtype=np.bool_)
    again[residuals.storage[choice == RECOMPUTE]] = True
    ops = residuals.chosen_ops(choice) + liveness.start
    room = np.zeros(len(again), np.int64)
    return float(_most_again.form(len(ops))(ops, forward, again, room))


def encode_treatments(residuals: Residuals, treatments: Mapping[str, Treatment]) -> Indices:
    """A choice from treatments by name. Names of other stages are passed over."""
    chosen = (treatments.get(name, "keep") for name in residuals.names)
    return np.array([NAMES.index(treatment) for treatment in chosen], dtype=np.int64)


class StageArrays(NamedTuple):
    """A stage, ops [start, end), as kernels see it.

    marks: (rows, most of ops and storages, + 1), see `AT` and `FIRST_AT`.  levels: (rows, ops), bytes, see
    `KEPT_FORWARD`.  ahead: 1 if all that is dropped is restored in front of the backward.
    """

    start: int
    end: int
    forward: ForwardArrays
    marks: Indices
    levels: Array
    ahead: int


AT, HEAD, FOLLOWING, PENDING, SEARCHED = range(5)
"""Rows of the marks, by op: in front of whose backward it runs again, -1 for never; the first op that does so
in front of it; the one after that; room for searches; the last search that came by."""

FIRST_AT, LAST_AT, LAST_OP, THERE, LAST_IN, SAVER, DROPPED, GOES, LETS_GO, TOUCHED = range(5, 15)
"""By storage: in front of whose backward ops that run again read it first, and last; the last of these ops;
whether a cheap op has made it; its last reader and first saver in the stage; whether it is dropped; the op of
the forward behind which it then goes, -1 for never. By op again: the storage that its backward lets go of
early, -1 for none. The last is a list: the storages that the stage touches, how many in its last column."""

KEPT_FORWARD, KEPT_BEFORE, KEPT_UNTIL, KEPT_AFTER, KEPT_WHOLE, FORWARD, BACKWARD, EARLIER = range(8)
"""Rows of the levels, by op: the five of the sweep that keeps everything, those with the choice, and from the
last on room for two that are compared with these."""

HELD, AGAIN, AWAY, EDGE, MESSAGE, OTHERS = 0, 1, 2, 3, 5, 7
"""Places among the sums: bytes of all residuals, of those recomputed, of those offloaded; then pairs: what
the sweep does not count in the forward and in the backward, what it does count of messages there, and how
many other micro-batches hold what is kept, and what is offloaded."""


@kernel
def _first_needs(stage: StageArrays) -> None:
    """Find where ops run again, and what they read when."""
    start, end, forward, marks, _, ahead = stage
    (reads_first, reads), _, (saves_first, saves), _, _, made, _, _ = forward
    for p in range(start, end):
        marks[AT, p] = -1
        marks[HEAD, p] = -1
    for k in range(marks[TOUCHED, -1]):
        s = marks[TOUCHED, k]
        marks[FIRST_AT, s] = -1
        marks[LAST_AT, s] = -1
        marks[THERE, s] = -1
    for p in range(end - 1, start - 1, -1):
        count = 0
        for k in range(saves_first[p], saves_first[p + 1]):
            m = made[saves[k]]
            if ahead == 0 and marks[DROPPED, saves[k]] > 0 and m >= start and marks[AT, m] < 0:
                marks[AT, m] = p
                marks[PENDING, count] = m
                count += 1
        while count > 0:
            count -= 1
            c = marks[PENDING, count]
            for k in range(reads_first[c], reads_first[c + 1]):
                s, m = reads[k], made[reads[k]]
                gone = marks[SAVER, s] < 0 or marks[DROPPED, s] > 0
                if start <= m < end and marks[AT, m] < 0 and gone:
                    marks[AT, m] = p
                    marks[PENDING, count] = m
                    count += 1
    for c in range(start, end):
        p = marks[AT, c]
        if p >= 0:
            for k in range(reads_first[c], reads_first[c + 1]):
                s = reads[k]
                marks[FIRST_AT, s] = max(marks[FIRST_AT, s], p)
                if marks[LAST_AT, s] < 0 or p <= marks[LAST_AT, s]:
                    marks[LAST_AT, s] = p
                    marks[LAST_OP, s] = c
    # Linked lists in rows of the marks: in front of the backward of p run again HEAD[p], FOLLOWING[HEAD[p]],
    # and so on. Each op is put in front of its list, from the last to the first: so lists ascend.
    for c in range(end - 1, start - 1, -1):
        if marks[AT, c] >= 0:
            marks[FOLLOWING, c] = marks[HEAD, marks[AT, c]]
            marks[HEAD, marks[AT, c]] = c


@kernel
def _forward_levels(stage: StageArrays) -> None:
    """What is dropped goes with its last reader, unless it is sent."""
    start, end, forward, marks, levels, _ = stage
    size, gone = forward.size, 0.0
    for p in range(start, end):
        levels[FORWARD, p] = 0.0
    for k in range(marks[TOUCHED, -1]):
        s = marks[TOUCHED, k]
        if marks[DROPPED, s] > 0 and marks[GOES, s] >= 0:
            levels[FORWARD, marks[GOES, s]] += size[s]
    # The row holds what goes behind each op until the op is passed, and its level from then on.
    for p in range(start, end):
        goes = levels[FORWARD, p]
        levels[FORWARD, p] = levels[KEPT_FORWARD, p] - gone
        gone += goes


@kernel
def _run_again(c: int, p: int, level: float, stage: StageArrays) -> tuple[float, float]:
    """Run op c again in front of the backward of op p.

    level: that before it, as a difference to everything kept.  Returns that in it, and that after it.
    """
    start, end, forward, marks, _, _ = stage
    (reads_first, reads), (makes_first, makes), _, extra, size, made, _, scratch = forward
    for k in range(reads_first[c], reads_first[c + 1]):
        s = reads[k]
        if made[s] < 0 and marks[THERE, s] < 0 and (marks[SAVER, s] < 0 or marks[DROPPED, s] > 0):
            marks[THERE, s] = 1
            level += size[s]
    unused = 0.0
    for k in range(makes_first[c], makes_first[c + 1]):
        s = makes[k]
        level += size[s]
        if marks[DROPPED, s] == 0 and (marks[SAVER, s] >= 0 or marks[LAST_AT, s] < 0):
            unused += size[s]
    most = level + scratch[c] + extra[c]
    level -= unused
    for k in range(reads_first[c], reads_first[c + 1]):
        s = reads[k]
        last = marks[LAST_AT, s] == p and marks[LAST_OP, s] == c
        read = marks[SAVER, s] < 0 or marks[SAVER, s] > p  # by backwards, if by any
        if last and read and (made[s] < 0 or start <= made[s] < end):
            level -= size[s]
    return most, level


@kernel
def _backward_levels(stage: StageArrays) -> None:
    """What is dropped is there from when it is made until the backward of its first saver, or longer; and all
    the time where it is restored ahead."""
    start, end, forward, marks, levels, ahead = stage
    (saves_first, saves), size, made = forward.saves, forward.size, forward.made
    level = 0.0
    for k in range(marks[TOUCHED, -1] if ahead == 0 else 0):
        s = marks[TOUCHED, k]
        if marks[DROPPED, s] > 0 and marks[SAVER, s] >= 0:
            level -= size[s]
    for p in range(end - 1, start - 1, -1):
        most = 0.0
        c = marks[HEAD, p]
        while c >= 0:
            here, level = _run_again(c, p, level, stage)
            most = max(most, levels[KEPT_BEFORE, p] + here)
            c = marks[FOLLOWING, c]
        for k in range(saves_first[p], saves_first[p + 1]):
            s = saves[k]
            if ahead == 0 and marks[DROPPED, s] > 0 and made[s] < 0 and marks[THERE, s] < 0:
                marks[THERE, s] = 1
                level += size[s]
        early = marks[LETS_GO, p]
        stays = early >= 0 and marks[SAVER, early] == p and 0 <= marks[LAST_AT, early] < p
        most = max(most, levels[KEPT_WHOLE if stays else KEPT_UNTIL, p] + level)
        for k in range(saves_first[p], saves_first[p + 1]):
            s = saves[k]
            if marks[SAVER, s] == p and 0 <= marks[LAST_AT, s] < p:
                level += size[s]
        levels[BACKWARD, p] = max(most, levels[KEPT_AFTER, p] + level)


@kernel
def levels_of(stage: StageArrays) -> tuple[float, float]:
    """Write what one micro-batch holds in the forward of each op and around its backward. Returns the most of
    both."""
    start, end, _, _, levels, _ = stage
    _first_needs(stage)
    _forward_levels(stage)
    _backward_levels(stage)
    ahead, back = 0.0, 0.0
    for p in range(start, end):
        ahead = max(ahead, levels[FORWARD, p])
        back = max(back, levels[BACKWARD, p])
    return ahead, back


@kernel
def of_others(sums: Array) -> float:
    """Bytes that the other micro-batches in flight hold."""
    kept: float = sums[HELD] - sums[AGAIN] - sums[AWAY]
    others: float = sums[OTHERS] * kept + sums[OTHERS + 1] * sums[AWAY]
    return others


@kernel
def peak_of(stage: StageArrays, sums: Array) -> float:
    """Bytes of a stage, static ones apart, at its worst moment."""
    ahead, back = levels_of(stage)
    own = sums[HELD] - sums[AGAIN]
    before: float = max(ahead, own + sums[MESSAGE]) + sums[EDGE]
    after: float = max(back, own + sums[MESSAGE + 1]) + sums[EDGE + 1]
    return of_others(sums) + max(before, after)


@dataclass(frozen=True, kw_only=True)
class RecomputeLiveness:
    """The moments of one stage, for any choice of treatments of its residuals.

    kept_sums: with nothing treated, see `HELD`.
    ahead: all that is dropped is restored in front of the backward; the scratch of that is left out.
    """

    sweep: LivenessSweep
    start: int
    end: int
    residuals: Residuals
    kept_sums: Array
    ahead: bool = False

    @cached_property
    def stage(self) -> StageArrays:
        forward, work = self.sweep.tensors.forward, self.sweep.work
        self.sweep.of_intervals(self.start, np.array([self.end]))
        ops, storages, ends = len(forward.extra), len(forward.size), [self.start, self.end]
        spans = ((rows.items, rows.first[ends]) for rows in (forward.reads, forward.makes, forward.saves))
        touched = np.unique(np.concatenate([items[a:b] for items, (a, b) in spans]))
        marks = np.zeros((TOUCHED + 1, max(ops, storages) + 1), np.int64)
        marks[LAST_IN, :storages], marks[SAVER, :storages] = work.last_in, work.saver
        marks[LETS_GO, :ops] = self.sweep.tensors.backward.lets_go
        marks[TOUCHED, : len(touched)], marks[TOUCHED, -1] = touched, len(touched)
        # What is dropped goes with its last reader; if it has none, with its maker; not at all if it is sent.
        made, sent, last_in = forward.made[touched], forward.last[touched] >= self.end, work.last_in[touched]
        read = (last_in >= 0) & ((made < 0) | ~sent)
        unread = (last_in < 0) & (made >= self.start) & ~sent
        marks[GOES, touched] = np.where(read, last_in, np.where(unread, made, -1))
        levels = np.zeros((EARLIER + 2, ops))
        levels[:FORWARD, self.start : self.end] = work.levels[:, self.start : self.end]
        return StageArrays(self.start, self.end, forward, marks, levels, int(self.ahead))

    @property
    def lives(self) -> tuple[Indices, Indices, Indices]:
        """Of each residual its maker, its last reader and its first saver in the stage, -1 for none."""
        at, marks = self.residuals.storage, self.stage.marks
        return self.sweep.tensors.forward.made[at], marks[LAST_IN, at], marks[SAVER, at]

    def freed_bytes(self, choice: Indices) -> Array:
        """Bytes of one micro-batch's residuals that are recomputed, and that are offloaded: (2,)."""
        size = self.residuals.size
        return np.array([size[choice == kind].sum() for kind in (RECOMPUTE, OFFLOAD)])

    def sums(self, choice: Indices) -> Array:
        """See `HELD` and what follows it."""
        sums = self.kept_sums.copy()
        sums[AGAIN], sums[AWAY] = self.freed_bytes(choice)
        return sums

    def highest_levels(self, choice: Indices) -> tuple[float, float]:
        """What one micro-batch holds at most in the forward and in the backward. Sets levels and marks."""
        self.stage.marks[DROPPED, self.residuals.storage] = choice == RECOMPUTE
        ahead, back = levels_of.form(self.end - self.start)(self.stage)
        return float(ahead), float(back)

    def peak(self, choice: Indices) -> float:
        """Bytes of the stage, static ones apart, at the worst moment. Sets levels and marks."""
        self.stage.marks[DROPPED, self.residuals.storage] = choice == RECOMPUTE
        return float(peak_of.form(self.end - self.start)(self.stage, self.sums(choice)))
