"""Names of residuals, as `ir.memory_policy` has them: by the op of the graph that made the tensor. A view is
never one: the tensor that owns its storage is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from .joint import Joint

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


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that owns the storage of `node`'s result."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


_COPY = "sent:"
"""In front of the name of what no op of the graph made: a copy that a stage makes of what it sends."""


def residual_names(joint: Joint, forward: Container[fx.Node]) -> dict[fx.Node, str]:
    """Name the tensors of the forward that own their storage."""
    nodes_of_op: dict[str, list[fx.Node]] = defaultdict(list)
    for node in joint.graph.nodes:
        if node in forward and node.op == "call_function":
            nodes_of_op[_origin(node).get("op", _COPY)].append(node)
    sent = set(joint.outputs.values())
    names: dict[fx.Node, str] = {}
    for op, nodes in nodes_of_op.items():
        owners = [node for node in nodes if not is_view(node) and isinstance(node.meta.get("val"), Tensor)]
        if op == _COPY:
            names |= {node: f"{_COPY}{node.name}" for node in owners}
            continue
        results = _origin(nodes[0])["results"]
        places = _of_several(nodes, results) if results else {_only_result(nodes, forward, sent): 0}
        further = max(1, len(results))
        for node in owners:
            if node not in places:
                places[node] = further
                further += 1
            names[node] = f"{op}.{places[node]}" if places[node] else op
    return names


def op_of(node: fx.Node) -> str:
    """The op of the captured graph that a joint graph's node comes from."""
    return str(_origin(node).get("op", node.name))


def _origin(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _only_result(nodes: list[fx.Node], forward: Container[fx.Node], sent: Container[fx.Node]) -> fx.Node:
    """The owner of an op's result: what other ops read of its tensors, of several the last."""
    inside = set(nodes)
    read = [
        node
        for node in nodes
        if node in sent or any(user in forward and user not in inside for user in node.users)
    ]
    return storage_owner((read or nodes)[-1])


def _of_several(nodes: list[fx.Node], results: tuple[Any, ...]) -> dict[fx.Node, int]:
    """Results of an op that has several -> their positions among those that the graph uses."""
    calls = [node for node in nodes if not isinstance(node.meta.get("val"), Tensor)]
    return {
        node: results.index(node.args[1])
        for node in nodes
        if node.target is getitem and node.args[0] is calls[-1] and node.args[1] in results
    }
