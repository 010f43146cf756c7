"""Shorten a joint graph without changing a number: calls that only rename a tensor are left out.

Tracing leaves a `detach` for each saved result and transposes weights back and forth; each costs a trip
through the dispatcher per micro-batch.

And `view` becomes `reshape`, as it was called: some kernels (batch normalisation of a transposed tensor, for
one) lay what they make otherwise than the fake ones that tracing ran, and then it takes a copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from .joint import Joint

_RENAMES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_VIEW = torch.ops.aten.view.default
_TRANSPOSE = torch.ops.aten.t.default


def simplify(joint: Joint) -> Joint:
    """The same graph, changed in place: no `detach`, no `t` of `t`, and no `view` that could fail."""
    stands_for: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node.target is _VIEW:
            node.target = torch.ops.aten.reshape.default
        same = _same_tensor(node)
        if same is not None:
            node.replace_all_uses_with(same)
            stands_for[node] = same

    def final(node: fx.Node) -> fx.Node:
        while node in stands_for:
            node = stands_for[node]
        return node

    for node in reversed(list(joint.graph.nodes)):
        left_over = node in stands_for or node.target is _TRANSPOSE
        if left_over and not node.users:
            joint.graph.erase_node(node)
    return replace(
        joint,
        outputs={name: final(node) for name, node in joint.outputs.items()},
        grads={name: final(node) for name, node in joint.grads.items()},
    )


def _same_tensor(node: fx.Node) -> fx.Node | None:
    """The node whose tensor this call gives back, if that is all it does."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in _RENAMES:
        return source
    if node.target is _TRANSPOSE and source.target is _TRANSPOSE:
        inner = source.args[0]
        assert isinstance(inner, fx.Node)
        return inner
    return None
