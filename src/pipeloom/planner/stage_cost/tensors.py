"""The graph as the cost model sees it: who reads what, and its tensors as arrays.

Positions count the ops that are not cheap, from 0. A cheap op is cloned into each stage that uses it
(ir.stages.cut): what it reads, the ops that use it read.

Storages are the tensors of the forward, views left out; what cheap ops make is there in every stage. Values
with a gradient are counted one by one: what a view's gradient shares is said by `passes`. Batch, parameters
and buffers are held anyway and do not appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...ir.graph import Op, OpGraph, Value, made_of_state, storages
from ...ir.memory_policy import residual_names
from ...ir.profile import Profile

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]


class RaggedArray(NamedTuple):
    """Lists of numbers, one after another: row r is `items[first[r] : first[r + 1]]`."""

    first: Indices
    items: Indices

    def __getitem__(self, row: int) -> Indices:  # type: ignore[override]
        return self.items[self.first[row] : self.first[row + 1]]


def rows(lists: Iterable[Iterable[int]]) -> RaggedArray:
    each = [list(one) for one in lists]
    first = np.cumsum([0, *map(len, each)])
    return RaggedArray(first.astype(np.int64), np.array([i for one in each for i in one], dtype=np.int64))


@dataclass(frozen=True)
class Readers:
    """A graph as a row of the ops that plans assign.

    order: another topological order of these, as positions in that of the graph; () for that of the graph.
    """

    graph: OpGraph
    order: tuple[int, ...] = ()

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        ops = tuple(op for op in self.graph.ops if not op.cheap)
        return tuple(ops[index] for index in self.order) if self.order else ops

    @cached_property
    def position(self) -> dict[str, int]:
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def cheap_readers(self) -> dict[str, tuple[int, ...]]:
        """Cheap op -> positions that need it, directly or through other cheap ops, ascending."""
        readers: dict[str, set[int]] = {}
        for op in reversed(self.graph.ops):
            if op.cheap:
                readers[op.name] = set()
                for value in op.outputs:
                    for name in self.graph.consumers[value.name]:
                        readers[op.name] |= readers[name] if name in readers else {self.position[name]}
        return {name: tuple(sorted(positions)) for name, positions in readers.items()}

    @cached_property
    def state_readers(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer -> positions of the ops that read it, cheap ones as above, ascending."""
        readers: dict[str, set[int]] = {name: set() for name in (*self.graph.parameter, *self.graph.buffer)}
        for op in self.graph.ops:
            where = self.cheap_readers[op.name] if op.cheap else (self.position[op.name],)
            for name in (*op.params, *op.buffers, *op.updates):
                readers[name].update(where)
        return {name: tuple(sorted(positions)) for name, positions in readers.items()}

    def value_readers(self, value: str) -> tuple[int, ...]:
        """Positions that need a value, directly or through cheap ops, ascending."""
        positions: set[int] = set()
        for reader in self.graph.consumers[value]:
            positions.update(self.cheap_readers.get(reader) or (self.position.get(reader, -1),))
        return tuple(sorted(positions - {-1}))

    def grad_readers(self, value: str) -> tuple[int, ...]:
        """Positions of the ops through which a gradient flows back to a value, ascending."""
        if not self.graph.value[value].needs_grad:
            return ()
        ops = [self.graph.op[name] for name in self.graph.consumers[value]]
        through = [op.name for op in ops if not op.cheap and any(v.needs_grad for v in op.outputs)]
        return tuple(sorted(self.position[name] for name in through))

    def produced_at(self, value: str) -> int:
        """Position of a value's producer; -1 for what every stage has or makes itself (batch, cheap ops)."""
        return self.position.get(self.graph.producer.get(value, ""), -1)

    def between(self, starts: Indices) -> Iterator[tuple[Value, int, tuple[int, ...]]]:
        """Of pieces that begin at `starts` the values that cross between them: each with the piece that makes
        it and those that read it, ascending."""
        for value in self.graph.value.values():
            if (made := self.produced_at(value.name)) >= 0:
                places = np.searchsorted(starts, [made, *self.value_readers(value.name)], side="right") - 1
                own, *readers = places.tolist()
                if others := tuple(sorted({*readers} - {own})):
                    yield value, own, others

    @cached_property
    def cut_points(self) -> Indices:
        """Positions in front of which a cut may be, both ends included: none between ops that share an
        updated buffer, or that the graph keeps whole."""
        torn = np.zeros(len(self.ops) + 1, dtype=np.bool_)
        for names in (*self.graph.together.values(), *self.graph.whole):
            if positions := [self.position[name] for name in names if name in self.position]:
                torn[min(positions) + 1 : max(positions) + 1] = True
        return np.nonzero(~torn)[0]

    @cached_property
    def base(self) -> dict[str, str]:
        return storages(self.graph)

    def is_whole(self, value: Value) -> bool:
        """Whether a value is as large as its storage. What is sent lies without gaps: a part is copied."""
        return value.bytes == self.graph.value[self.base[value.name]].bytes


def find_saved_storages(readers: Readers, profile: Profile) -> dict[str, tuple[str, ...]]:
    """Op -> storages of the values that it saves; those of parameters and buffers are there anyway."""
    state = made_of_state(readers.graph)
    saved: dict[str, tuple[str, ...]] = {}
    for op in readers.ops:
        names = {readers.base[s]: None for s in profile.costs[op.name].saves if s not in state}
        saved[op.name] = tuple(names)
    return saved


EVERYWHERE = -1
"""Maker of what every stage makes itself: the values of cheap ops."""

STATE = -2
"""Maker of parameters."""

OUTSIDE = 1 << 60
"""A reader behind every stage: that of the loss, whose gradient is given, and that of a buffer's next state,
which the forward hands out at its end."""


ONE_KERNEL = ("norm", "conv", "attention", "grouped_mm")
"""Parts of the names of ops whose backward makes all gradients at once."""

NEW, PASSED, ADDED = 0, 1, 2
"""What the gradient of an op's input is: a new tensor; the output's own; a product that is added where it
belongs while it is made, unless another op of the stage reads the parameter too."""


class ForwardArrays(NamedTuple):
    """What ops 0 .. n-1 read, make and save in the forward, as kernels see it. Sizes in bytes.

    reads, makes, saves: op -> storages.  extra, scratch: of an op, what it saves and needs besides.
    size, made, last: of a storage, with its maker's position and its last reader's.
    """

    reads: RaggedArray
    makes: RaggedArray
    saves: RaggedArray
    extra: Array
    size: Array
    made: Indices
    last: Indices
    scratch: Array


class BackwardArrays(NamedTuple):
    """The same of the backward, by values with a gradient and by parameters.

    outs: op -> its outputs that have a gradient.  gives: op -> its inputs that have one, parameters too.
    passes: along `gives.items`, see `NEW`.
    grad_size, grad_made, grad_last: of a gradient's value; a parameter's maker is `STATE`, and the last
        reader is one through which a gradient flows.
    grad_scratch: of an op; below 0 where the gradient of a parameter is added where it belongs before the
        others are made.
    begun: of an op, the most that its backward makes before it lets go of a storage, which is `lets_go`, -1
        for none; 0 where it makes all at once.
    one_kernel: of an op, whether it makes all its gradients at once.
    """

    outs: RaggedArray
    gives: RaggedArray
    passes: Indices
    grad_size: Array
    grad_made: Indices
    grad_last: Indices
    grad_scratch: Array
    begun: Array
    lets_go: Indices
    one_kernel: NDArray[np.bool_]


class Tensors(NamedTuple):
    """Of one graph.

    names, residuals: of storages; the latter as in ir.memory_policy, "" for one that planners cannot name.
    fixed: ops that must not run again: they draw random numbers, or read or update a buffer that changes.
    """

    forward: ForwardArrays
    backward: BackwardArrays
    names: tuple[str, ...]
    residuals: tuple[str, ...]
    fixed: NDArray[np.bool_]

    def in_front(self, positions: Sequence[int]) -> Tensors:
        """The same with these ops at positions 0, 1, ..., and all others behind them."""
        f, b, count = self.forward, self.backward, len(self.fixed)
        order = np.array([*positions, *np.setdiff1d(np.arange(count), positions)], dtype=np.int64)
        # Old position -> new one. Two entries more: makers may be `EVERYWHERE` (-1) or `STATE` (-2), which
        # index the last two, and these say that they stay what they are.
        place = np.empty(count + 2, dtype=np.int64)
        place[order] = np.arange(count)
        place[[EVERYWHERE, STATE]] = EVERYWHERE, STATE
        forward = f._replace(
            reads=_take(f.reads, order),
            makes=_take(f.makes, order),
            saves=_take(f.saves, order),
            extra=f.extra[order],
            made=place[f.made],
            last=_in_order(f.last, f.reads, place),
            scratch=f.scratch[order],
        )
        backward = b._replace(
            outs=_take(b.outs, order),
            gives=_take(b.gives, order),
            passes=b.passes[_rows_in_order(b.gives, order)],
            grad_made=place[b.grad_made],
            grad_last=_in_order(b.grad_last, b.gives, place),
            grad_scratch=b.grad_scratch[order],
            begun=b.begun[order],
            lets_go=b.lets_go[order],
            one_kernel=b.one_kernel[order],
        )
        return self._replace(forward=forward, backward=backward, fixed=self.fixed[order])


def _rows_in_order(lists: RaggedArray, order: Indices) -> Indices:
    return _take(lists._replace(items=np.arange(lists.first[-1])), order).items


def _take(lists: RaggedArray, order: Indices) -> RaggedArray:
    lengths = np.diff(lists.first)[order]
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    moved = np.repeat(lists.first[:-1][order] - first[:-1], lengths)  # how much further in front a row was
    return RaggedArray(first, lists.items[np.arange(first[-1]) + moved])


def _in_order(last: Indices, lists: RaggedArray, place: Indices) -> Indices:
    """Last readers in another order; those behind every stage stay there."""
    return np.where(last == OUTSIDE, OUTSIDE, _last_of(lists, place, len(last)))


def _last_of(lists: RaggedArray, place: Indices, count: int) -> Indices:
    """Of each item the highest new place of a row that lists it; -1 for none."""
    last = np.full(count, -1, dtype=np.int64)
    np.maximum.at(last, lists.items, np.repeat(place[: len(lists.first) - 1], np.diff(lists.first)))
    return last


def tensors_of(readers: Readers, saves: Mapping[str, Sequence[str]], profile: Profile) -> Tensors:
    """saves: op -> storages (see `find_saved_storages`)."""
    graph, base = readers.graph, readers.base
    outside = {v.name for v in graph.inputs} | made_of_state(graph)
    names = tuple(v for v in dict.fromkeys(base.values()) if v not in outside)
    number = {name: index for index, name in enumerate(names)}

    def storages(values: Iterable[str]) -> list[int]:
        return [number[b] for b in dict.fromkeys(base[v] for v in values) if b in number]

    reads = rows(storages(op.inputs) for op in readers.ops)
    ops = readers.ops
    trained = [p for p in graph.parameters if p.trainable]
    learning = [v for v in graph.value.values() if v.needs_grad]
    sizes = {v.name: v.bytes for v in learning} | {p.name: p.bytes for p in trained}
    grad = {name: index for index, name in enumerate(sizes)}
    through = [any(v.needs_grad for v in op.outputs) for op in ops]
    gives = [
        [name for name in (*op.inputs, *op.params) if name in grad] if back else []
        for op, back in zip(ops, through, strict=True)
    ]
    given = rows([grad[name] for name in names] for names in gives)
    costs = [profile.costs[op.name] for op in ops]
    here = np.arange(len(ops) + 1)
    known, changing = residual_names(graph), set(graph.together)
    grad_last = _last_of(given, here, len(grad))
    grad_last[[grad[v.name] for v in learning if v.name == graph.loss]] = OUTSIDE
    last = _last_of(reads, here, len(names))
    last[storages(v for op in ops for v in _next_states(op, graph))] = OUTSIDE
    # What each gradient is, and what a backward needs besides those that are new tensors.
    kinds, scratch = [], []
    for cost, wanted in zip(costs, gives, strict=True):
        own = [PASSED if n in cost.passes else ADDED if n in cost.adds else NEW for n in wanted]
        kinds += own
        new = sum(sizes[name] for name, kind in zip(wanted, own, strict=True) if kind == NEW)
        scratch.append(cost.grad_rest_bytes - new if cost.grad_rest_bytes else cost.grad_transient_bytes)
    return Tensors(
        ForwardArrays(
            reads=reads,
            makes=rows(storages(v.name for v in op.outputs if base[v.name] == v.name) for op in ops),
            saves=rows([number[v] for v in saves[op.name] if v in number] for op in ops),
            extra=_floats(c.extra_saved_bytes for c in costs),
            size=_floats(graph.value[v].bytes for v in names),
            made=np.array([readers.produced_at(v) for v in names], dtype=np.int64),
            last=last,
            scratch=_floats(c.transient_bytes for c in costs),
        ),
        BackwardArrays(
            outs=rows([grad[v.name] for v in op.outputs if v.name in grad] for op in ops),
            gives=given,
            passes=np.array(kinds, dtype=np.int64),
            grad_size=_floats(sizes.values()),
            grad_made=np.array(
                [readers.produced_at(v.name) for v in learning] + [STATE] * len(trained), np.int64
            ),
            grad_last=grad_last,
            grad_scratch=_floats(scratch),
            begun=_floats(c.grad_first_bytes for c in costs),
            lets_go=np.array([number.get(base.get(c.lets_go, ""), -1) for c in costs], dtype=np.int64),
            one_kernel=np.array([any(part in op.target for part in ONE_KERNEL) for op in ops]),
        ),
        names=names,
        residuals=tuple(known.get(v, "") for v in names),
        fixed=np.array([op.random or bool(changing.intersection((*op.buffers, *op.updates))) for op in ops]),
    )


def _next_states(op: Op, graph: OpGraph) -> list[str]:
    """The outputs of an op that are next states of buffers: the last ones of the buffers' shapes."""
    states: list[str] = []
    for name in reversed(op.updates):
        shape = graph.buffer[name].shape
        left = [v.name for v in op.outputs if v.shape == shape and v.name not in states]
        states += left[-1:]
    return states


def _floats(numbers: Iterable[float]) -> Array:
    return np.array(list(numbers), dtype=np.float64)
