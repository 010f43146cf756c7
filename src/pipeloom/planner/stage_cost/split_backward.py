"""Split backward: what I makes and hands on to W, and what each of them holds at most.

I makes the gradients of what a stage received, and all that these need: those of every value that depends on
it. W makes the rest: those of parameters, and of values that depend on parameters only. For these it gets
what the ops saved, and the gradients of the results of the ops that they belong to, which I hands on.

Some backwards are one kernel for all gradients: they run in I, which hands on the finished gradients of their
parameters. A stage that receives nothing with a gradient has nothing to do in I, and all in W.

Tensors live as in `sweep`; but residuals that W reads, and gradients, outlive I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .liveness import GIVEN, LivenessSweep
from .tensors import ADDED, PASSED, STATE, Tensors

ONE_KERNEL = ("norm", "conv", "attention", "grouped_mm")
"""Parts of the names of ops whose backward makes all gradients at once."""


class SplitBackward(NamedTuple):
    """Bytes of one micro-batch.

    carried: from I to W, messages not counted.  input_grad, weight_grad: the most that I has on top of the
    residuals, and W on top of what is carried, at any moment.
    """

    carried: float
    input_grad: float
    weight_grad: float


def sweep_split_backward(
    sweep: LivenessSweep, positions: Sequence[int], targets: Sequence[str]
) -> SplitBackward:
    """positions: of the stage's ops, ascending.  targets: what each op of the graph calls, by position."""
    own, start, end = sweep.apart(positions)
    _, saver, _ = own.moments(start, end)
    single = {
        place for place, at in enumerate(positions, start) if any(part in targets[at] for part in ONE_KERNEL)
    }
    walk = _Walk(own.tensors, (start, end), saver.tolist(), single)
    return walk.both()


class _Walk:
    """One pass for I and one for W over the ops of an interval, last op first."""

    def __init__(
        self, tensors: Tensors, span: tuple[int, int], saver: Sequence[int], single: Collection[int]
    ) -> None:
        self.t, (self.start, self.end) = tensors, span
        self.saver = saver
        self.single = single
        here = range(*span)
        self.outs = {p: tensors.makes_grads[p].tolist() for p in here}
        self.gives = {p: tensors.gives[p].tolist() for p in here}
        self.passes = {
            p: tensors.passes[tensors.gives.first[p] : tensors.gives.first[p + 1]].tolist() for p in here
        }
        made = tensors.grad_made
        values = {g for given in self.gives.values() for g in given if made[g] >= 0}
        self.received = {g for g in values if not self.start <= made[g] < self.end}
        self.reached = self._reached()
        self.givers = Counter(g for given in self.gives.values() for g in given)
        self.size = [0.0]
        self.holders = [1]
        self.current: dict[int, int] = {}
        """Value or parameter -> the tensor that holds its gradient."""
        self.arriving: dict[int, int] = {}
        """Op -> the gradient of its result that W reads."""
        self.level = self.most = 0.0

    def _reached(self) -> set[int]:
        """The values with a gradient that depend on what is received."""
        found = set(self.received)
        for p in range(self.start, self.end):
            if found.intersection(self.gives[p]):
                found.update(self.outs[p])
        return found

    def both(self) -> SplitBackward:
        t, here = self.t, range(self.end - 1, self.start - 1, -1)
        for p in here:
            self.current |= {g: GIVEN for g in self.outs[p] if t.grad_last[g] >= self.end}
        first = {p: self._first(p) for p in here}
        later = {p: [k for k in range(len(self.gives[p])) if k not in first[p]] for p in here}
        saved = {s for p in here for s in t.saves[p].tolist() if self.saver[s] >= 0}
        wanted = saved.intersection(s for p in here if later[p] for s in t.saves[p].tolist())
        residual = float(sum(t.size[s] for s in saved) + t.extra[self.start : self.end].sum())
        self.level = self.most = residual
        for p in here:
            done = saved - wanted
            self._op(p, first[p], self._freed(p, done) + (0.0 if later[p] else t.extra[p]), bool(later[p]))
        for g in self.received & self.current.keys():
            self._drop(self.current.pop(g))
        carried, input_grad = self.level, self.most - residual
        self.most = carried
        for p in here:
            self._op(p, later[p], self._freed(p, wanted) + (t.extra[p] if later[p] else 0.0), False)
        return SplitBackward(carried, input_grad, self.most - carried)

    def _first(self, p: int) -> list[int]:
        """Which of the gradients that an op gives are made in I, by their place."""
        if not self.reached.intersection(self.outs[p]):
            return []
        return [k for k, g in enumerate(self.gives[p]) if p in self.single or g in self.reached]

    def _freed(self, p: int, among: Collection[int]) -> float:
        """Bytes of residuals that go with an op."""
        return float(
            sum(self.t.size[s] for s in self.t.saves[p].tolist() if self.saver[s] == p and s in among)
        )

    def _op(self, p: int, given: Sequence[int], freed: float, hands_on: bool) -> None:
        """The part of an op's backward that gives these of its inputs, by their place, a gradient.

        freed: bytes of residuals that go with it.  hands_on: whether W reads the gradient that arrives.
        """
        t, outs = self.t, self.outs[p]
        arrived = [self.arriving.pop(p)] if p in self.arriving else self._arrived(outs)
        passed = next(iter(arrived), -1)
        if passed < 0 or not given:
            self.level -= freed
            return
        whole = len(given) == len(self.gives[p])
        early = self.level + (t.first[p] if whole else 0.0)
        made = self._made(p, given, passed)
        gone = t.size[t.lets_go[p]] if whole and t.lets_go[p] >= 0 and self.saver[t.lets_go[p]] == p else 0.0
        self.most = max(self.most, early, self.level + (t.grad_scratch[p] if whole else 0.0) - gone)
        self.level -= freed
        in_turn = p in self.single and bool(self.reached.intersection(outs))
        if hands_on:
            self.arriving[p] = passed
        for tensor in arrived[1:] if hands_on else arrived:
            self._drop(tensor)
        for g, tensor in made.items():
            self._add(g, tensor)
            self.givers[g] -= 1
            if t.grad_made[g] == STATE and not self.givers[g] and not in_turn:
                self._drop(self.current.pop(g))
        self.most = max(self.most, self.level)

    def _arrived(self, outs: Sequence[int]) -> list[int]:
        """The tensors that hold the gradients of an op's results."""
        return [self.current[g] for g in outs if g in self.current]

    def _made(self, p: int, given: Sequence[int], passed: int) -> dict[int, int]:
        """Value or parameter -> the tensor with what an op adds to its gradient."""
        made: dict[int, int] = {}
        for k in given:
            g, how = self.gives[p][k], self.passes[p][k]
            if how == PASSED:
                made[g] = passed
                self.holders[passed] += 1
            elif how == ADDED and self.givers[g] == 1 and g not in self.current:
                made[g] = GIVEN
            else:
                made[g] = self._new(float(self.t.grad_size[g]))
        return made

    def _new(self, size: float) -> int:
        self.size.append(size)
        self.holders.append(1)
        self.level += size
        return len(self.size) - 1

    def _drop(self, tensor: int) -> None:
        if tensor != GIVEN:
            self.holders[tensor] -= 1
            if not self.holders[tensor]:
                self.level -= self.size[tensor]

    def _add(self, g: int, tensor: int) -> None:
        """Add a part of a gradient: in one of the two if nothing else holds it, or in a new tensor."""
        before = self.current.get(g)
        if before is None:
            self.current[g] = tensor
        elif before != GIVEN and self.holders[before] == 1:
            self._drop(tensor)
        elif tensor != GIVEN and self.holders[tensor] == 1:
            self._drop(before)
            self.current[g] = tensor
        else:
            self.current[g] = self._new(self.t.grad_size[g])
            self.most = max(self.most, self.level)
            self._drop(before)
            self._drop(tensor)
