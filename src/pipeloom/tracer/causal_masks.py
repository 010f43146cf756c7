"""Attention whose mask is the causal one is told so: kernels skip what it hides, and no mask is made, kept or
sent. Under torch.export Transformers makes that mask, and leaves it out elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .op_graph import ancestors
from .tensors import arguments_of

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

LARGEST = 1 << 26
"""Numbers of a mask that is looked at: those of 8192 tokens."""


def replace_causal_masks(graph: fx.Graph) -> None:
    """In place; what made the masks is left to the elimination of dead code."""
    made: dict[fx.Node, bool] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given = arguments_of(_ATTENTION, node.args, node.kwargs)
        mask = given["attn_mask"]
        if not isinstance(mask, fx.Node) or given["is_causal"]:
            continue
        if mask not in made:
            numbers = _constant(mask, graph)
            made[mask] = numbers is not None and _is_causal(numbers)
        tokens = {given[name].meta["val"].shape[-2] for name in ("query", "key")}
        if made[mask] and tokens == {mask.meta["val"].shape[-1]}:
            node.args = (*node.args[:3], None, given["dropout_p"], True)
            node.kwargs = {name: v for name, v in node.kwargs.items() if name in ("scale", "enable_gqa")}


def _is_causal(numbers: Tensor) -> bool:
    if numbers.ndim < 2 or numbers.shape[-2] != numbers.shape[-1]:
        return False
    seen = torch.ones(numbers.shape[-2:], dtype=torch.bool).tril()
    if numbers.dtype == torch.bool:
        return bool((numbers == seen).all())
    least = torch.finfo(numbers.dtype).min  # nothing is left of it after a softmax
    return bool(torch.where(seen, numbers == 0, numbers <= least).all())


def _constant(node: fx.Node, graph: fx.Graph) -> Tensor | None:
    """What a node always is; None if it depends on the batch, parameters or chance, or is too large."""
    needed = ancestors([node], lambda one: not _is_of_constants(one))
    if not needed.issuperset([node, *(source for one in needed for source in one.all_input_nodes)]):
        return None
    known: dict[fx.Node, Tensor] = {}
    with torch.no_grad(), unset_fake_temporarily():
        for one in graph.nodes:
            if one in needed:
                args, kwargs = fx.map_arg((one.args, dict(one.kwargs)), known.__getitem__)
                known[one] = one.target(*args, **kwargs)
    return known[node]


def _is_of_constants(node: fx.Node) -> bool:
    """Whether it is made of its inputs alone, on the CPU, and is small."""
    val, target = node.meta.get("val"), node.target
    small = isinstance(val, Tensor) and val.device.type == "cpu" and val.numel() <= LARGEST
    return small and isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags
