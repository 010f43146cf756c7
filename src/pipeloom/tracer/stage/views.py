"""Which nodes of a graph make no tensor of their own."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

_VIEWS_BY_CONVENTION = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.reshape.default,  # in a joint graph, see `simplify`
}


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares the storage of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if node.target in _VIEWS_BY_CONVENTION:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def root(node: fx.Node) -> fx.Node:
    """The node that owns the storage of `node`'s result."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node
