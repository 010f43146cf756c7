"""The liveness sweep: the most that one micro-batch holds in a stage's forward, and in its backward.

Forward, op by op: what it makes is there until its last reader in the stage, or to the end if an op saves it
or it is sent. Backward, in the opposite order: a residual goes with the backward of the first op that saved
it, or in the middle of that if the op then lets go of it. A value's gradient begins with the last reader's
backward, as a new tensor or as that of the reader's output passed on; each further reader's is added up with
it, in one of the two, or in a new tensor if both are held elsewhere too; it goes with the backward of the
value's maker. Gradients that come from other stages lie in messages' buffers, those of parameters are added
where they belong at once.

A backward may be split. I makes the gradients of what the stage received, and all that these need: those of
every value that depends on it. W makes the rest: those of parameters, and of values that depend on parameters
only. For these it gets what the ops saved, and the gradients of the results of the ops that they belong to,
which I hands on. Some backwards are one kernel for all gradients: they run in I, which hands on the finished
gradients of their parameters. A stage that receives nothing with a gradient has nothing to do in I, and all
in W. One walk is for all three: it goes over the ops once per phase, and makes the gradients of that phase;
the whole backward B is a W in which all is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...ir.kernels import kernel
from .tensors import ADDED, PASSED, STATE, Array, BackwardArrays, ForwardArrays, Indices, Tensors

GIVEN = 0
"""The gradient tensor that is held elsewhere."""


IN_I, IN_W = 0, 1
"""Phases of a backward; a whole one is all `IN_W`."""


class PhaseArrays(NamedTuple):
    """When a backward makes what, and lets go of it, by phase.

    of_grad: (gives,), when each gradient is made.  releases: (storages,), when a residual goes.
    ends: (ops,), the last phase in which an op runs.  handed: (ops,), the tensor that its I hands on to its
    W, -1 for none.
    """

    of_grad: Indices
    releases: Indices
    ends: Indices
    handed: Indices


class SplitBackward(NamedTuple):
    """Bytes of one micro-batch.

    carried: from I to W, messages not counted.  input_grad, weight_grad: the most that I has on top of the
    residuals, and W on top of what is carried, at any moment.
    """

    carried: float
    input_grad: float
    weight_grad: float


class SweepArrays(NamedTuple):
    """A graph, and room for one sweep over a stage of it. Gradient tensors are numbered from 1, see `GIVEN`.

    last_in, saver: (storages,), last reader and first saver in the stage, -1 for none.
    levels: (5, ops), bytes alive, see `_in_forward` and `_in_backward`.
    current: (gradients,), the tensor that holds each, -1 for none.  giver: (gradients,), the last op of the
    backward that makes a part of each, see `_moment`.
    tensor_size, holders: (tensors,), bytes, and how many gradients each holds.
    given: (most inputs of an op,), the tensors that one op gives.
    """

    forward: ForwardArrays
    backward: BackwardArrays
    phases: PhaseArrays
    last_in: Indices
    saver: Indices
    levels: Array
    current: Indices
    giver: Indices
    tensor_size: Array
    holders: Indices
    given: Indices


@kernel
def _owners(start: int, end: int, work: SweepArrays) -> tuple[float, float]:
    """Find the last reader and the first saver of each storage in the stage, -1 for none.

    Returns: (residual bytes, bytes of what the stage has before its first op: that of cheap ops).
    """
    # Entries are left as the sweep before has set them, and reset only for what this stage touches: else the
    # time of each sweep would grow with the whole graph.
    last_in, saver = work.last_in, work.saver
    (reads_first, reads), (makes_first, makes), (saves_first, saves), extra, size, made, _, _ = work.forward
    for p in range(start, end):
        for k in range(reads_first[p], reads_first[p + 1]):
            last_in[reads[k]] = -1
            if made[reads[k]] < 0:
                saver[reads[k]] = -1
        for k in range(makes_first[p], makes_first[p + 1]):
            last_in[makes[k]] = -1
            saver[makes[k]] = -1
        for k in range(saves_first[p], saves_first[p + 1]):
            saver[saves[k]] = -1
    residual = 0.0
    before = 0.0
    for p in range(start, end):
        for k in range(saves_first[p], saves_first[p + 1]):
            s = saves[k]
            if saver[s] < 0 and (made[s] < 0 or start <= made[s] < end):
                saver[s] = p
                residual += size[s]
                if made[s] < 0 and last_in[s] < 0:
                    before += size[s]
                    last_in[s] = p
        residual += extra[p]
        for k in range(reads_first[p], reads_first[p + 1]):
            s = reads[k]
            if made[s] < 0 and last_in[s] < 0:
                before += size[s]
            last_in[s] = p
    return residual, before


@kernel
def _in_forward(start: int, end: int, work: SweepArrays, level: float) -> float:
    """The most that is alive, from `level` on; in `levels[0]` that in each op."""
    last_in, saver, levels = work.last_in, work.saver, work.levels
    (reads_first, reads), (makes_first, makes), _, extra, size, made, last, scratch = work.forward
    most = level
    for p in range(start, end):
        for k in range(makes_first[p], makes_first[p + 1]):
            level += size[makes[k]]
        level += extra[p]
        levels[0, p] = level + scratch[p]
        most = max(most, levels[0, p])
        for k in range(reads_first[p], reads_first[p + 1]):
            s = reads[k]
            own = made[s] < 0 or (start <= made[s] < end and last[s] < end)
            if last_in[s] == p and own and saver[s] < 0:
                level -= size[s]
        for k in range(makes_first[p], makes_first[p + 1]):
            s = makes[k]
            if last_in[s] < 0 and saver[s] < 0 and last[s] < end:
                level -= size[s]
    return most


@kernel
def _dropped(tensor: int, holders: Indices, tensor_size: Array) -> float:
    """Bytes that are free once a gradient tensor has one holder less."""
    if tensor <= GIVEN:
        return 0.0
    holders[tensor] -= 1
    return tensor_size[tensor] if holders[tensor] == 0 else 0.0


@kernel
def _moment(p: int, phase: int, ops: int) -> int:
    """A number of the backward of op p in a phase: the later it is, the smaller."""
    return p + ops * (IN_W - phase)


@kernel
def _last_givers(start: int, end: int, begin: int, work: SweepArrays) -> None:
    """Which gradients are given from outside, and the last op that makes a part of each. begin: a phase."""
    backward, phases, current, giver = work.backward, work.phases, work.current, work.giver
    (outs_first, outs), (gives_first, gives), ops = backward.outs, backward.gives, work.levels.shape[1]
    for phase in range(begin, IN_W + 1):
        for p in range(end - 1, start - 1, -1):
            for k in range(gives_first[p], gives_first[p + 1]):
                current[gives[k]] = -1
                if phases.of_grad[k] == phase:
                    giver[gives[k]] = _moment(p, phase, ops)
    for p in range(end - 1, start - 1, -1):
        for k in range(outs_first[p], outs_first[p + 1]):
            current[outs[k]] = GIVEN if backward.grad_last[outs[k]] >= end else -1


@kernel
def _give(p: int, now: int, passed: int, tensors: int, work: SweepArrays) -> tuple[int, float]:
    """Write which tensor holds the gradient that op p gives each input now: what it is passed, or new ones.

    tensors: the first free number.  Returns: the next free one, and the bytes of those that are new.
    """
    backward, (gives_first, gives) = work.backward, work.backward.gives
    passes, grad_size = backward.passes, backward.grad_size
    of_grad, current, giver = work.phases.of_grad, work.current, work.giver
    tensor_size, holders, given = work.tensor_size, work.holders, work.given
    moment, first, made = _moment(p, now, work.levels.shape[1]), gives_first[p], 0.0
    for k in range(first, gives_first[p + 1]):
        g = gives[k]
        if of_grad[k] != now:
            continue
        if passes[k] == PASSED:
            given[k - first] = passed
            holders[passed] += 1
        elif passes[k] == ADDED and current[g] < 0 and giver[g] == moment:
            given[k - first] = GIVEN
        else:
            given[k - first] = tensors
            tensor_size[tensors] = grad_size[g]
            holders[tensors] = 1
            tensors += 1
            made += grad_size[g]
    return tensors, made


@kernel
def _let_go_of_outputs(p: int, now: int, passed: int, work: SweepArrays) -> float:
    """Bytes of the gradients of op p's outputs that are free after it; an I whose W comes later keeps what it
    was passed."""
    phases, (outs_first, outs) = work.phases, work.backward.outs
    if phases.handed[p] >= 0:
        return _dropped(passed, work.holders, work.tensor_size)
    freed = 0.0
    for k in range(outs_first[p], outs_first[p + 1]):
        tensor = work.current[outs[k]]
        if tensor >= 0 and now < phases.ends[p] and phases.handed[p] < 0:
            phases.handed[p] = tensor
        else:
            freed += _dropped(tensor, work.holders, work.tensor_size)
    return freed


@kernel
def _in_backward(
    start: int, end: int, now: int, work: SweepArrays, level: float, tensors: int
) -> tuple[float, float, int]:
    """One phase of the backward, from a level on. Returns the most that is alive, the level after it, and the
    next free number of a tensor.

        levels  1          2                    3
        op p    | begin -- residuals go -- gradients are added up |        (4: as 2, if nothing goes early)

    `levels` gets what is alive before each op (1), the most from there until residuals go (2), and after (3);
    and (4) the most until then if the op lets go of nothing early.
    """
    _, _, (saves_first, saves), extra, size, _, _, _ = work.forward
    backward = work.backward
    (outs_first, outs), (gives_first, gives) = backward.outs, backward.gives
    grad_size, grad_made = backward.grad_size, backward.grad_made
    grad_scratch, begun, lets_go = backward.grad_scratch, backward.begun, backward.lets_go
    of_grad, releases, ends, handed = work.phases
    saver, levels, current, giver = work.saver, work.levels, work.current, work.giver
    tensor_size, holders, given = work.tensor_size, work.holders, work.given
    most = level
    for p in range(end - 1, start - 1, -1):
        moment, first, behind = _moment(p, now, levels.shape[1]), gives_first[p], gives_first[p + 1]
        passed = handed[p]
        for k in range(outs_first[p], outs_first[p + 1]):
            if passed < 0:
                passed = current[outs[k]]
        count = 0
        for k in range(first, behind):
            count += 1 if of_grad[k] == now else 0
        learns = passed >= 0 and (count > 0 or (first == behind and ends[p] == now))
        whole = count == behind - first
        levels[1, p] = level
        levels[2, p] = level
        levels[4, p] = level
        if learns:
            early = level + (begun[p] if whole else 0.0)
            tensors, made = _give(p, now, passed, tensors, work)
            level += made
            scratch = grad_scratch[p] if whole else 0.0
            levels[4, p] = max(early, level + scratch)
            gone = 0.0
            if whole and lets_go[p] >= 0 and saver[lets_go[p]] == p:
                gone = size[lets_go[p]]
            levels[2, p] = max(early, level + scratch - gone)
            level -= _let_go_of_outputs(p, now, passed, work)
        if ends[p] == now:
            level -= extra[p]
        for k in range(saves_first[p], saves_first[p + 1]):
            if saver[saves[k]] == p and releases[saves[k]] == now:
                level -= size[saves[k]]
        for k in range(first, behind if learns and now == IN_W else first):
            g = gives[k]
            if of_grad[k] == now and grad_made[g] == STATE and current[g] < 0 and giver[g] == moment:
                level -= _dropped(given[k - first], holders, tensor_size)
                given[k - first] = GIVEN
        levels[3, p] = level
        for k in range(first, behind if learns else first):
            # A gradient that comes from two ops is added up in a tensor that only it holds, if one of the two
            # is such. `shared` is held by another gradient too, or by another stage.
            #
            #     current  given     after                bytes
            #     -        any       given                counted when it was given
            #     own      any       own (+= given)       those of given, if this was its last holder, go
            #     shared   own       own (+= shared)      those of shared, likewise
            #     shared   shared    a new tensor         all three are alive while it is made
            #
            g = gives[k]
            if of_grad[k] != now:
                continue
            if current[g] < 0:
                current[g] = given[k - first]
            elif current[g] > GIVEN and holders[current[g]] == 1:  # added up in place
                level -= _dropped(given[k - first], holders, tensor_size)
            elif given[k - first] > GIVEN and holders[given[k - first]] == 1:
                level -= _dropped(current[g], holders, tensor_size)
                current[g] = given[k - first]
            else:  # added up in a new tensor
                level += grad_size[g]
                levels[3, p] = max(levels[3, p], level)
                level -= _dropped(current[g], holders, tensor_size)
                level -= _dropped(given[k - first], holders, tensor_size)
                tensor_size[tensors] = grad_size[g]
                holders[tensors] = 1
                current[g] = tensors
                tensors += 1
            if now == IN_W and grad_made[g] == STATE and giver[g] == moment:
                level -= _dropped(current[g], holders, tensor_size)
        most = max(most, levels[2, p], levels[3, p])
    return most, level, tensors


@kernel
def _divide(start: int, end: int, work: SweepArrays, reached: NDArray[np.bool_]) -> None:
    """Write what I makes, and what W. reached: becomes the values that depend on what the stage receives."""
    backward, (saves_first, saves) = work.backward, work.forward.saves
    (outs_first, outs), (gives_first, gives), grad_made = backward.outs, backward.gives, backward.grad_made
    of_grad, releases, ends, handed = work.phases
    for p in range(start, end):
        for k in range(gives_first[p], gives_first[p + 1]):
            made = grad_made[gives[k]]
            reached[gives[k]] = made >= 0 and not start <= made < end
        for k in range(outs_first[p], outs_first[p + 1]):
            reached[outs[k]] = False
    for p in range(start, end):
        reads = False
        for k in range(gives_first[p], gives_first[p + 1]):
            reads = reads or reached[gives[k]]
        for k in range(outs_first[p], outs_first[p + 1]):
            reached[outs[k]] = reached[outs[k]] or reads
    for p in range(start, end):
        ends[p], handed[p] = IN_I, -1
        leads = False
        for k in range(outs_first[p], outs_first[p + 1]):
            leads = leads or reached[outs[k]]
        for k in range(gives_first[p], gives_first[p + 1]):
            in_i = leads and (backward.one_kernel[p] or reached[gives[k]])
            of_grad[k] = IN_I if in_i else IN_W
            ends[p] = max(ends[p], of_grad[k])
        for k in range(saves_first[p], saves_first[p + 1]):
            releases[saves[k]] = IN_I
    for p in range(start, end):
        for k in range(saves_first[p], saves_first[p + 1]):
            releases[saves[k]] = max(releases[saves[k]], ends[p])


@kernel
def _split_sweep(
    start: int, end: int, work: SweepArrays, reached: NDArray[np.bool_]
) -> tuple[float, float, float]:
    """I and W of a stage, see `SplitBackward`. What I made for the stage in front is sent before W."""
    current, (gives_first, gives), grad_made = work.current, work.backward.gives, work.backward.grad_made
    residual, _ = _owners(start, end, work)
    _divide(start, end, work, reached)
    _last_givers(start, end, IN_I, work)
    most, level, tensors = _in_backward(start, end, IN_I, work, residual, GIVEN + 1)
    for k in range(gives_first[start], gives_first[end]):
        g = gives[k]
        if grad_made[g] >= 0 and not start <= grad_made[g] < end and current[g] >= 0:
            level -= _dropped(current[g], work.holders, work.tensor_size)
            current[g] = -1
    last, _, _ = _in_backward(start, end, IN_W, work, level, tensors)
    return level, most - residual, last - level


@kernel
def _sweeps(start: int, ends: Indices, work: SweepArrays, found: Array) -> None:
    """One sweep per end; `found` gets a column of three figures for each."""
    for index in range(len(ends)):
        end = ends[index]
        residual, before = _owners(start, end, work)
        found[0, index] = residual
        found[1, index] = _in_forward(start, end, work, before)
        _last_givers(start, end, IN_W, work)
        found[2, index], _, _ = _in_backward(start, end, IN_W, work, residual, GIVEN + 1)


class LivenessSweep:
    """Sweeps over stages of one graph. Time of each grows with the tensors that its ops touch."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors, (f, b) = tensors, (tensors.forward, tensors.backward)
        ops, storages, gives, grads = len(f.extra), len(f.size), len(b.passes), len(b.grad_size)
        whole = PhaseArrays(
            of_grad=np.full(gives, IN_W),
            releases=np.full(storages, IN_W),
            ends=np.full(ops, IN_W),
            handed=np.full(ops, -1),
        )
        self.work = SweepArrays(
            f,
            b,
            whole,
            last_in=np.zeros(storages, np.int64),
            saver=np.zeros(storages, np.int64),
            levels=np.zeros((5, ops)),
            current=np.zeros(grads, np.int64),
            giver=np.zeros(grads, np.int64),
            tensor_size=np.zeros(2 * gives + 2),
            holders=np.zeros(2 * gives + 2, np.int64),
            given=np.zeros(gives + 1, np.int64),
        )

    def of_intervals(self, start: int, ends: Indices) -> Array:
        """Of ops [start, end), for each end: residual bytes, most in the forward, most in the backward."""
        found = np.zeros((3, len(ends)))
        sweep = _sweeps.form(int((ends - start).sum()))
        sweep(start, np.asarray(ends, dtype=np.int64), self.work, found)
        return found

    def split_backward(self, positions: Sequence[int]) -> SplitBackward:
        """What I and W of any set of ops (ascending) hold."""
        sweep, start, end = self.apart(positions)
        work = sweep.work._replace(phases=PhaseArrays(*map(np.zeros_like, sweep.work.phases)))
        reached = np.zeros(len(work.current), np.bool_)
        return SplitBackward(*_split_sweep.form(end - start)(start, end, work, reached))

    def of_stage(self, positions: Sequence[int]) -> tuple[float, float, float]:
        """The same three figures of any set of ops (ascending)."""
        sweep, start, end = self.apart(positions)
        return tuple(sweep.of_intervals(start, np.array([end]))[:, 0].tolist())

    def apart(self, positions: Sequence[int]) -> tuple[LivenessSweep, int, int]:
        """A sweep in which these ops are an interval, and its start and end."""
        start, end = positions[0], positions[-1] + 1
        if end - start == len(positions):
            return self, start, end
        return LivenessSweep(self.tensors.in_front(positions)), 0, len(positions)

    @cached_property
    def bounds(self) -> Array:
        """Per op the most that can be alive around it in any stage, without residuals and messages: in the
        forward, in the backward."""
        f, b = self.tensors.forward, self.tensors.backward
        ops = len(f.extra)
        change = np.zeros((2, ops + 1))
        saved = f.saves.items[f.made[f.saves.items] >= 0]  # others may be saved in another stage only
        unsaved = np.setdiff1d(np.arange(len(f.size)), saved)
        op = np.repeat(np.arange(ops), np.diff(b.gives.first))
        first = np.where(b.grad_made >= 0, b.grad_made, ops)
        np.minimum.at(first, b.gives.items, op)
        spans = (
            (0, np.maximum(f.made, 0)[unsaved], np.clip(f.last, f.made, ops - 1)[unsaved], f.size[unsaved]),
            (1, first, np.minimum(b.grad_last, ops - 1), b.grad_size),
        )
        for row, begin, last, size in spans:
            # A sweep line: bytes come where a span begins and go behind its end; the running sum is what is
            # alive at each op if all ops are one stage. Not in it: a storage that only another stage saves,
            # of which a part is sent (an expected failure in tests/planner/test_cost_model.py).
            alive = last >= begin
            np.add.at(change[row], begin[alive], size[alive])
            np.add.at(change[row], last[alive] + 1, -size[alive])
        found = np.cumsum(change, axis=1)[:, :-1] + np.stack([f.scratch, np.maximum(b.begun, b.grad_scratch)])
        np.add.at(found[1], op, 2 * b.grad_size[b.gives.items])
        return np.asarray(found)
