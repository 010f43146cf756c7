"""Shapes, dtypes and the flow of gradients through a captured graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter


def autocast_region(device: str, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision as the user asked for it; off when dtype is None."""
    return torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def propagate(
    module: fx.GraphModule, targets: Mapping[str, str], model: nn.Module, *, training: bool = True
) -> None:
    """Run the graph on fake tensors with autograd on; leave results in `node.meta`.

    meta["val"]: the fake result, detached.  meta["needs_grad"]: a gradient of the loss with respect to
    it flows, that is, it depends on a trainable parameter and the loss depends on it differentiably.
    """
    named = model.named_parameters(remove_duplicate=False)
    trainable = {n for n, p in named if p.requires_grad and training}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    inputs: list[Any] = []
    with fake:
        for node in module.graph.find_nodes(op="placeholder"):
            val = node.meta["val"]
            tensor = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
            inputs.append(tensor.requires_grad_(targets[node.name] in trainable))
    with fake, torch.enable_grad():
        _Propagator(module, garbage_collect_values=True).run(*inputs)
    _mark_needed(module.graph)


class _Propagator(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "placeholder"):
            n.meta["requires_grad"] = any(t.requires_grad for t in tensors_of(result))
            n.meta["val"] = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, result)
        return result


def _mark_needed(graph: fx.Graph) -> None:
    """Walk back from the loss along values that require gradients."""
    pending = [graph.output_node().args[0][-1]]  # type: ignore[index]  # the loss comes last
    needed: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, fx.Node) and node not in needed and node.meta.get("requires_grad"):
            needed.add(node)
            pending.extend(node.all_input_nodes)
    for node in graph.nodes:
        node.meta["needs_grad"] = node in needed
