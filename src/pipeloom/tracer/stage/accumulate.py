"""Gradients that are added up where they lie, as autograd's engine does it.

Two gradients of one value: a functional graph has a third tensor for their sum. Where nothing reads one of
the two afterwards, its memory can hold the sum: a tensor less at that moment, and no new memory to fill.

    c = add(a, b)   ->   add_(a, b)     if a fills its storage, was made in this graph and is read here last

Gradients of a parameter: they go to a `Sink` as soon as they are made. One that is a product of matrices is
added to the sum by the product itself: no tensor of the size of the weight is made for it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from ..tensors import storage_ids, tensors_of
from .functions import Sink

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def add_in_place(graph: fx.Graph, sums: Collection[fx.Node]) -> None:
    """Change those of the `sums` that can be made in place, and the fake results that tell where tensors lie.

    What comes from outside, is read again, or is handed out stays as it is, and so does what is only a
    part of its storage.
    """
    foreign: set[int] = set()
    last: dict[int, fx.Node] = {}
    inside: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in _storages(node):
            inside.setdefault(storage, []).append(node)
            if node.op != "call_function":
                foreign.add(storage)
        for source in node.all_input_nodes:
            last |= dict.fromkeys(_storages(source), node)
    for node in graph.nodes:
        if node not in sums or node.target is not _ADD or node.kwargs:
            continue
        for target, other in (node.args, node.args[::-1]):
            if isinstance(target, fx.Node) and isinstance(other, fx.Node) and _fits(target, other, node):
                (target_storage,), (sum_storage,) = _storages(target), _storages(node)
                if target_storage in foreign or last[target_storage] is not node:
                    continue
                node.target, node.args = _ADD_IN_PLACE, (target, other)
                for each in inside[sum_storage]:
                    _move(each, sum_storage, target.meta["val"])
                inside[target_storage] += inside.pop(sum_storage)
                last[target_storage] = last.pop(sum_storage, node)
                break


def _fits(target: fx.Node, other: fx.Node, result: fx.Node) -> bool:
    """Whether the sum of `own` and `other` can lie where `own` does."""
    a, b, c = target.meta.get("val"), other.meta.get("val"), result.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not isinstance(c, Tensor):
        return False
    alike = a.shape == c.shape and a.stride() == c.stride() and a.dtype == c.dtype
    whole = a.untyped_storage().nbytes() == a.numel() * a.element_size()
    apart = a.untyped_storage()._cdata != b.untyped_storage()._cdata
    return alike and whole and apart


def _storages(node: fx.Node) -> set[int]:
    return storage_ids(tensors_of(node.meta.get("val")))


def _move(node: fx.Node, storage: int, home: Tensor) -> None:
    """Let a fake result that lies in `storage` lie in that of `home`."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata != storage:
            return tensor
        return home.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    with home.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = tree_map_only(Tensor, moved, node.meta["val"])


def add_gradient(sink: Sink, name: str, grad: Tensor) -> None:
    """A call in a backward graph: the gradient of parameter `name` is ready."""
    sink.add(name, grad)


def add_product(sink: Sink, name: str, left: Tensor, right: Tensor) -> None:
    """A call in a backward graph: the gradient of parameter `name` is the matrix product of the two."""
    sink.add_product(name, left, right)


def add_products(graph: fx.Graph) -> None:
    """Let matrix products that are only gradients of a parameter be added up while they are made: no gradient
    of the size of a weight is alive besides the sum."""
    for node in graph.find_nodes(op="call_function", target=add_gradient):
        sink, name, grad = node.args
        if grad.target is torch.ops.aten.mm.default and len(grad.users) == 1:
            node.target, node.args = add_product, (sink, name, *grad.args)
            graph.erase_node(grad)
