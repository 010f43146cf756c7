"""Bytes alive while code runs that is no graph: every storage that it makes, until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..random import call_draws
from ..tensors import storage_ids, tensors_of


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the ATen calls made under it.

    level, peak: bytes alive now and at most, of storages made under it and of those it was told of.
    drew: whether any call drew random numbers.  statistics: storages of running statistics that were updated
        (a batch norm's schema does not say so, and its version counter does not move).
    """

    def __init__(self, owned: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.level = self.peak = 0
        self.drew = False
        self.statistics: set[int] = set()
        for tensor in owned:
            self._add(tensor.untyped_storage())
        self.start = self.peak = self.level

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive above the level at the start."""
        return self.peak - self.start

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage was made under this mode."""
        return tensor.untyped_storage()._cdata in self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = storage_ids(tensors_of((args, kwargs)))
        result = func(*args, **kwargs)
        self.drew = self.drew or call_draws(func, args, kwargs)
        if "batch_norm" in str(func) and "backward" not in str(func):
            self.statistics |= storage_ids(tensors_of(args[3:5]))
        for tensor in (t for t in tensors_of(result) if t.layout is torch.strided):  # sparse ones have none
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs:
                self._add(storage)
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
