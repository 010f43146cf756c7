"""Products that copy what they multiply: the copy becomes an op of the captured graph.

`matmul`, `linear` and `einsum` end in products of matrices that lie in one piece. What does not (heads that
were transposed, a tensor that is expanded) they copy first, and autograd keeps the copy, not what was copied.
As an op of its own a planner sees it, and may recompute or offload it. Numbers stay the same to the bit: the
same kernels get the same operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

_aten = torch.ops.aten
_PRODUCTS = {_aten.matmul.default, _aten.linear.default, _aten.einsum.default}
_OWN = ("val", "requires_grad", "needs_grad")
_CLONE = _aten.clone.default


def unfold_copies(graph: fx.Graph) -> dict[str, str]:
    """Replace products that copy operands by the copies and what is done with them.

    graph: with `meta` filled by `propagate_gradient_flow`, which most new nodes lack.
    Returns: name of a replaced node -> name of the one that makes its result now.
    """
    renamed = {}
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or not _may_copy(node):
            continue
        inside = _inside(node)
        if not inside.find_nodes(op="call_function", target=_CLONE):
            continue
        before = {*graph.nodes}
        with graph.inserting_before(node):
            replacement = (
                _linear(node, inside) if node.target is _aten.linear.default else _inlined(node, inside)
            )
        for new in {*graph.nodes} - before:
            new.meta = {key: value for key, value in node.meta.items() if key not in _OWN}
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        renamed[node.name] = replacement.name
        graph.erase_node(node)
    return renamed


def _may_copy(node: fx.Node) -> bool:
    """Whether it is worth a closer look."""
    return node.target is not _aten.linear.default or not node.all_input_nodes[0].meta["val"].is_contiguous()


def _inside(node: fx.Node) -> fx.Graph:
    """What a call does, on tensors like its own: a placeholder for each of `node.all_input_nodes`."""
    sources = node.all_input_nodes

    def call(*tensors: Tensor) -> Any:
        tensor_of = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), tensor_of.__getitem__)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        return target(*args, **kwargs)

    tensors = [source.meta["val"].detach().requires_grad_(source.meta["requires_grad"]) for source in sources]
    with torch.enable_grad():
        traced: fx.Graph = make_fx(call)(*tensors).graph
    traced.eliminate_dead_code()
    return traced


def _linear(node: fx.Node, inside: fx.Graph) -> fx.Node:
    """It stays whole behind the copy, as its weight's gradient is made otherwise than that of any matrix."""
    value, weight, *bias = node.args

    def call(name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return node.graph.create_node("call_function", target, args, kwargs, name=name)

    copy = call("clone", _CLONE, value, memory_format=torch.contiguous_format)
    if not bias or bias[0] is None or inside.find_nodes(op="call_function", target=_aten.addmm.default):
        return call("linear", _aten.linear.default, copy, weight, *bias)
    product = call("linear", _aten.linear.default, copy, weight)
    return call("add", _aten.add.Tensor, product, bias[0])


def _inlined(node: fx.Node, inside: fx.Graph) -> fx.Node:
    sources = dict(zip(inside.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    result = node.graph.graph_copy(inside, sources)
    assert isinstance(result, fx.Node)
    return result
