"""How tensors lie in memory: a value that crosses to another stage lies there as it does in one process.

What an op saves, and whether a reshape copies, depends on it. A value of which the storage holds more than it
(a slice) is sent without gaps, its dimensions in the same order; one that repeats its numbers (an expanded
tensor) as its dimensions are numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..ir.graph import Value

DimOrder = tuple[int, ...]
"""As `ir.graph.Value.order`."""


def memory_order(tensor: Tensor) -> DimOrder:
    """The order in which a tensor's dimensions lie in memory.

    >>> memory_order(torch.empty(2, 3, 4).transpose(1, 2)), memory_order(torch.empty(2, 3, 4))
    ((0, 2, 1), ())
    >>> memory_order(torch.empty(2, 3, 1).expand(2, 3, 4))
    ()
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    if any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        return ()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
    return () if order == tuple(range(tensor.ndim)) else order


def permute_to_memory(tensor: Tensor, order: DimOrder) -> Tensor:
    """The tensor with its dimensions as they lie in memory."""
    return tensor.permute(order) if order else tensor


def has_order(tensor: Tensor, order: DimOrder) -> bool:
    """Whether a tensor lies without gaps, its dimensions in this order."""
    return permute_to_memory(tensor, order).is_contiguous()


def view_in_order(row: Tensor, shape: Sequence[int], order: DimOrder) -> Tensor:
    """A row of numbers as a tensor of this shape that lies so; shares the row's memory.

    >>> view_in_order(torch.arange(6), (3, 2), (1, 0)).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    if not order:
        return row.view(tuple(shape))
    return row.view([shape[dim] for dim in order]).permute(_inverse(order))


def copy_in_order(tensor: Tensor, order: DimOrder) -> Tensor:
    """A copy that lies so."""
    copy = permute_to_memory(tensor, order).clone(memory_format=torch.contiguous_format)
    return copy.permute(_inverse(order)) if order else copy


def ensure_unshared(tensor: Tensor, order: DimOrder, taken: set[int]) -> Tensor:
    """The tensor if it lies so and fills a storage that is not among those taken, else a copy that does.

    taken: storages by their `_cdata`; that of the result is added.
    """
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    if storage._cdata in taken or not whole or not has_order(tensor, order):
        tensor = copy_in_order(tensor, order)
    taken.add(tensor.untyped_storage()._cdata)
    return tensor


def zeros_like_value(value: Value, device: torch.device | str | None = None) -> Tensor:
    """Zeros that lie as a value and its gradient do."""
    row = torch.zeros(prod(value.shape), dtype=getattr(torch, value.dtype), device=device)
    return view_in_order(row, value.shape, value.order)


def _inverse(order: DimOrder) -> DimOrder:
    return tuple(sorted(range(len(order)), key=order.__getitem__))
