"""Which tensors there are, how they look at their storages, and how many bytes are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def autocast_region(device: str, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision as the user asked for it; off when dtype is None."""
    return torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and registered classes, in order."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def storage_ids(tensors: Iterable[Tensor]) -> set[int]:
    """What identifies the storages of these tensors while they are alive."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


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
