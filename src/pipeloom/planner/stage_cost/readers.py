"""Who reads what, once cheap ops are taken as present wherever they are needed.

Plans assign the ops that are not cheap. A cheap op is cloned into each stage that uses it (ir.stages.cut),
so to the cost model it is no op of the graph's order: what it reads, the ops that use it read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...ir.graph import Op, OpGraph, Value, storages, views_of_state
from ...ir.profile import Profile
from .arrays import Indices


@dataclass(frozen=True)
class Readers:
    """A graph as a row of assignable ops. Positions count the ops that are not cheap, from 0.

    order: another topological order of these, as positions in that of the graph; () for that of the graph.
    """

    graph: OpGraph
    order: tuple[int, ...] = ()

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops to assign, in order."""
        ops = tuple(op for op in self.graph.ops if not op.cheap)
        return tuple(ops[index] for index in self.order) if self.order else ops

    @cached_property
    def position(self) -> dict[str, int]:
        """Op name -> position; cheap ops have none."""
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

    @cached_property
    def cut_points(self) -> Indices:
        """Positions in front of which a cut may be, both ends included: none between ops that share an
        updated buffer."""
        torn = np.zeros(len(self.ops) + 1, dtype=np.bool_)
        for names in self.graph.together.values():
            positions = [self.position[name] for name in names]
            torn[min(positions) + 1 : max(positions) + 1] = True
        return np.nonzero(~torn)[0]

    @cached_property
    def base(self) -> dict[str, str]:
        """Value -> the value whose storage it shares in the end."""
        return storages(self.graph)

    def is_whole(self, value: Value) -> bool:
        """Whether a value is as large as its storage. What is sent lies without gaps: a part is copied."""
        return value.bytes == self.graph.value[self.base[value.name]].bytes


def find_saved_storages(readers: Readers, profile: Profile) -> dict[str, tuple[str, ...]]:
    """Op -> storages of the values that it saves; those of parameters and buffers are there anyway."""
    state = views_of_state(readers.graph)
    saved: dict[str, tuple[str, ...]] = {}
    for op in readers.ops:
        names = {readers.base[s]: None for s in profile.costs[op.name].saves if s not in state}
        saved[op.name] = tuple(names)
    return saved
