"""Who reads what, once cheap ops are taken as present wherever they are needed.

Plans assign the ops that are not cheap. A cheap op is cloned into each stage that uses it (ir.stages.cut),
so to the cost model it is no op of the graph's order: what it reads, the ops that use it read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..ir.graph import Op, OpGraph
from ..ir.profile import Profile


@dataclass(frozen=True)
class Wiring:
    """A graph as a row of assignable ops. Positions count the ops that are not cheap, from 0."""

    graph: OpGraph

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops to assign, in the graph's order."""
        return tuple(op for op in self.graph.ops if not op.cheap)

    @cached_property
    def position(self) -> dict[str, int]:
        """Op name -> position; cheap ops have none."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def cheap_users(self) -> dict[str, tuple[int, ...]]:
        """Cheap op -> positions that need it, directly or through other cheap ops, ascending."""
        users: dict[str, set[int]] = {}
        for op in reversed(self.graph.ops):
            if op.cheap:
                found: set[int] = set()
                for value in op.outputs:
                    for reader in self.graph.consumers[value.name]:
                        found |= users[reader] if reader in users else {self.position[reader]}
                users[op.name] = found
        return {name: tuple(sorted(found)) for name, found in users.items()}

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer -> positions of the ops that read it, cheap ones as above, ascending."""
        found: dict[str, set[int]] = {name: set() for name in (*self.graph.parameter, *self.graph.buffer)}
        for op in self.graph.ops:
            where = self.cheap_users[op.name] if op.cheap else (self.position[op.name],)
            for name in (*op.params, *op.buffers):
                found[name].update(where)
        return {name: tuple(sorted(positions)) for name, positions in found.items()}

    def readers(self, value: str) -> tuple[int, ...]:
        """Positions that need a value, directly or through cheap ops, ascending."""
        found: set[int] = set()
        for reader in self.graph.consumers[value]:
            found.update(self.cheap_users.get(reader) or (self.position.get(reader, -1),))
        return tuple(sorted(found - {-1}))

    def made_at(self, value: str) -> int:
        """Position of a value's maker; -1 for what every stage has or makes itself (batch, cheap ops)."""
        return self.position.get(self.graph.producer.get(value, ""), -1)

    def parent(self, value: str) -> str | None:
        """The value whose storage `value` shares as the direct output of a view, if any."""
        maker = self.graph.producer.get(value)
        op = self.graph.op[maker] if maker is not None else None
        return op.inputs[0] if op is not None and op.view and op.inputs else None

    @cached_property
    def base(self) -> dict[str, str]:
        """Value -> the value whose storage it shares in the end: itself, unless made by a view."""
        found: dict[str, str] = {}
        for name in self.graph.value:  # batch inputs, then ops in order: a parent comes first
            parent = self.parent(name)
            found[name] = name if parent is None else found[parent]
        return found

    def is_state(self, value: str) -> bool:
        """Whether a value's storage is a parameter's or buffer's: made by a view that reads no value."""
        op = self.graph.op.get(self.graph.producer.get(self.base[value], ""))
        return op is not None and op.view and not op.inputs


def saved_by(wiring: Wiring, profile: Profile) -> dict[str, tuple[str, ...]]:
    """Op -> bases of the values that it saves; the storage of parameters is never saved."""
    found: dict[str, tuple[str, ...]] = {}
    for op in wiring.ops:
        names = {wiring.base[s]: None for s in profile.costs[op.name].saves}
        found[op.name] = tuple(n for n in names if not wiring.is_state(n))
    return found
