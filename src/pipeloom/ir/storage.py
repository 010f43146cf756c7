"""Which values share one storage: views, followed down to the tensor that was really made."""

from __future__ import annotations

from .graph import Op, OpGraph


def viewed(op: Op) -> str | None:
    """The value that an op's outputs are views of; None if it makes tensors, or views of a parameter."""
    return op.inputs[0] if op.view and op.inputs else None


def storages(graph: OpGraph) -> dict[str, str]:
    """Value -> the value whose storage it shares in the end: itself, unless a view made it."""
    found = {value.name: value.name for value in graph.inputs}
    for op in graph.ops:  # in order, so what an op reads is there already
        parent = viewed(op)
        for value in op.outputs:
            found[value.name] = value.name if parent is None else found[parent]
    return found


def views_of_state(graph: OpGraph) -> frozenset[str]:
    """Values whose storage is a parameter's or a buffer's."""
    held = storages(graph)
    roots = {v.name for op in graph.ops if op.view and not op.inputs for v in op.outputs}
    return frozenset(name for name, base in held.items() if base in roots)
