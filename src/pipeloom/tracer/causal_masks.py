"""Attention whose mask is the causal one is told so: kernels skip what it hides, and no mask is made, kept or
sent. Under torch.export Transformers makes that mask, and leaves it out elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

LARGEST = 1 << 26
"""Numbers of a mask that is looked at: those of 8192 tokens."""


def replace_causal_masks(graph: fx.Graph) -> None:
    """In place; what made the masks is left to the elimination of dead code."""
    known: dict[fx.Node, Tensor | None] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given = dict(
            zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False)
        )
        given |= node.kwargs
        mask = given.get("attn_mask")
        if isinstance(mask, fx.Node) and not given.get("is_causal") and _is_causal(mask, given, known):
            node.args = (*node.args[:3], None, given.get("dropout_p", 0.0), True)
            node.kwargs = {name: v for name, v in node.kwargs.items() if name in ("scale", "enable_gqa")}


def _is_causal(mask: fx.Node, given: dict[str, Any], known: dict[fx.Node, Tensor | None]) -> bool:
    shape = mask.meta["val"].shape
    tokens = {given[name].meta["val"].shape[-2] for name in ("query", "key")} | set(shape[-2:])
    if len(tokens) != 1 or len(shape) < 2 or (numbers := _constant(mask, known)) is None:
        return False
    seen = torch.ones(shape[-2:], dtype=torch.bool).tril()
    if numbers.dtype == torch.bool:
        return bool((numbers == seen).all())
    least = torch.finfo(numbers.dtype).min  # nothing is left of it after a softmax
    return bool(torch.where(seen, numbers == 0, numbers <= least).all())


def _constant(node: fx.Node, known: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """What a node always is; None if it depends on the batch, parameters or chance, or is too large."""
    if node not in known:
        known[node] = None
        inputs = {each: _constant(each, known) for each in node.all_input_nodes}
        val = node.meta.get("val")
        if (
            node.op == "call_function"
            and isinstance(val, Tensor)
            and val.numel() <= LARGEST
            and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
            and all(tensor is not None for tensor in inputs.values())
        ):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), inputs.__getitem__)
            with torch.no_grad(), unset_fake_temporarily():
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]
