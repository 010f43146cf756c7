"""Which tensors there are, how they lie in memory and look at their storages, and how many bytes are alive.

What an op saves, and whether a reshape copies, depends on how a tensor lies: a value that crosses to another
stage lies there as it does in one process. A value of which the storage holds more than it (a slice) is sent
without gaps, its dimensions in the same order; one that repeats its numbers (an expanded tensor) as its
dimensions are numbered.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..ir.graph import Value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and registered classes, in order."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def arguments_of(call: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, with their defaults."""
    schema = call._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def written_by(call: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call changes."""
    given = arguments_of(call, args, kwargs)
    return [given[a.name] for a in call._schema.arguments if a.alias_info and a.alias_info.is_write]


def storage_ids(tensors: Iterable[Tensor]) -> set[int]:
    """What identifies the storages of these tensors while they are alive."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of what some tensors lie in, each storage once."""
    return sum({(storage := t.untyped_storage())._cdata: storage.nbytes() for t in tensors}.values())


class StorageView(NamedTuple):
    """How a tensor looks at its storage now: `.data = ...` changes it later.

    storage: a number that is the storage's own while it is alive.  stride, offset: in elements.
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        storage, offset = int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())
        return cls(storage, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor that looks so at another storage.

        >>> tensor = torch.arange(6).view(2, 3).T
        >>> StorageView.of(tensor).on(torch.arange(6).untyped_storage()).tolist()
        [[0, 3], [1, 4], [2, 5]]
        """
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages made by the ATen calls under it, until they are freed.

    owned: tensors that count from the start.  alive: storage -> bytes.
    level, peak: bytes alive now and at most.
    """

    def __init__(self, owned: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.level = self.peak = 0
        for tensor in owned:
            self._add(tensor.untyped_storage())
        self._start = self.peak = self.level

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive above the level at the start."""
        return self.peak - self._start

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage was made under this mode."""
        return tensor.untyped_storage()._cdata in self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = storage_ids(tensors_of((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in (t for t in tensors_of(result) if t.layout is torch.strided):  # sparse ones have none
            if tensor.untyped_storage()._cdata not in inputs:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.level += storage.nbytes()
            self.peak = max(self.peak, self.level)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.level -= self.alive.pop(key, 0)


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
