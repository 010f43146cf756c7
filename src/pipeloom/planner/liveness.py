"""What is alive around each op besides residuals: for the transient part of a stage's memory.

In the backward of op t the gradient of a value is there if a reader of the value at or after t has run its
backward in this stage, and the value's maker has not: made <= t <= some reader in the stage. In the forward
the same holds of values that no op saves. What crosses out of the stage lies in its messages' buffers.
Scratch of the op comes on top, and in the backward the new gradients of its parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..ir.profile import Profile
from .intervals import Array, Indices
from .wiring import Wiring

EVERYWHERE = -1
"""Maker of what every stage makes itself: the values of cheap ops."""


@dataclass(frozen=True)
class Span:
    """A tensor that may be alive in the forward, or its gradient in the backward.

    made: position of its maker, or EVERYWHERE.  readers: positions that read it (of a gradient: those
        through which one flows), ascending.
    """

    made: int
    readers: tuple[int, ...]
    bytes: int
    backward: bool


class Liveness:
    """Of one graph, whose ops save what `saves` says."""

    def __init__(self, wiring: Wiring, saves: Mapping[str, Sequence[str]], profile: Profile) -> None:
        self.wiring = wiring
        self.saved = {v.name for v in wiring.graph.inputs}.union(*saves.values())
        trained = {p.name: p.bytes for p in wiring.graph.parameters if p.trainable}
        # The gradient of a view of a parameter is that of the parameter already.
        fresh = [0 if op.view else sum(trained.get(name, 0) for name in op.params) for op in wiring.ops]
        self.fresh: Array = np.array(fresh, dtype=np.float64)
        scratch = [profile.costs[op.name].transient_bytes for op in wiring.ops]
        self.scratch: Array = np.array(scratch, dtype=np.float64)

    @cached_property
    def spans(self) -> list[Span]:
        """One per storage that no op saves, and one per storage with a gradient."""
        wiring, graph = self.wiring, self.wiring.graph
        readers: dict[str, set[int]] = {base: set() for base in wiring.base.values()}
        learners: dict[str, set[int]] = {base: set() for base in wiring.base.values()}
        for value, base in wiring.base.items():
            users = (wiring.position.get(name) for name in graph.consumers[value])
            readers[base].update(position for position in users if position is not None)
            learners[base].update(wiring.grad_readers(value))
        spans = []
        for base in readers:
            made, size = wiring.made_at(base), graph.value[base].bytes
            if base not in self.saved:
                spans.append(Span(made, tuple(sorted(readers[base])), size, backward=False))
            spans.append(Span(made, tuple(sorted(learners[base])), size, backward=True))
        return [span for span in spans if span.readers]

    @cached_property
    def bound(self) -> Array:
        """Per op the most that can be alive around it in any stage, scratch included."""
        change = np.zeros((2, len(self.scratch) + 1))
        for span in self.spans:
            change[int(span.backward), max(span.made, 0)] += span.bytes
            change[int(span.backward), span.readers[-1] + 1] -= span.bytes
        forward, backward = np.cumsum(change, axis=1)[:, :-1]
        return np.asarray(np.maximum(forward, backward + self.fresh) + self.scratch)

    def of_stage(self, positions: Sequence[int]) -> Array:
        """The same for the ops of one stage (ascending), exactly."""
        inside = {position: index for index, position in enumerate(positions)}
        change = np.zeros((2, len(positions) + 1))
        for span in self.spans:
            last = max((inside[r] for r in span.readers if r in inside), default=None)
            if last is not None and (span.backward or span.made in inside or span.made == EVERYWHERE):
                change[int(span.backward), inside.get(span.made, 0)] += span.bytes
                change[int(span.backward), last + 1] -= span.bytes
        forward, backward = np.cumsum(change, axis=1)[:, :-1]
        at = np.array(positions, dtype=np.int64)
        return np.asarray(np.maximum(forward, backward + self.fresh[at]) + self.scratch[at])

    def of_intervals(self, start: int, ends: Indices) -> Array:
        """The same for the intervals [start, end): (ops from `start`, ends); -inf from its end on."""
        stop = int(ends[-1])
        width = stop - start
        window = slice(self._begin[start], self._begin[stop])
        at, reader, size, made, backward = self._steps[:, window]
        column = np.searchsorted(ends, reader, side="right")
        cell = (at.astype(np.int64) - start) * len(ends) + column
        here = column < len(ends)
        own = (made >= start) | (made == EVERYWHERE)

        def alive(counts: NDArray[np.bool_]) -> Array:
            cells = np.bincount(cell[counts], size[counts], minlength=width * len(ends))
            return np.cumsum(cells.reshape(width, len(ends)), axis=1, dtype=np.float64)

        gradients = alive(here & (backward > 0)) + self.fresh[start:stop, None]
        most = np.maximum(alive(here & own & (backward == 0)), gradients) + self.scratch[start:stop, None]
        return np.where(np.arange(start, stop)[:, None] < ends, most, -np.inf)

    @cached_property
    def _steps(self) -> Array:
        """Rows (at, next reader, bytes, made, backward): `at` an op around which a span is alive if its next
        reader, at or after the op, is in the stage; ascending in `at`."""
        steps = [
            (at, s.readers[bisect_left(s.readers, at)], s.bytes, s.made, s.backward)
            for s in self.spans
            for at in range(max(s.made, 0), s.readers[-1] + 1)
        ]
        return np.array(sorted(steps, key=lambda step: step[0]), dtype=np.float64).reshape(-1, 5).T

    @cached_property
    def _begin(self) -> Indices:
        return np.searchsorted(self._steps[0], np.arange(len(self.scratch) + 1))
