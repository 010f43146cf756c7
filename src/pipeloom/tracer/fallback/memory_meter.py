"""What the ATen calls of a module do besides what they return: bytes, random numbers, running statistics."""

from __future__ import annotations

from typing import Any

from ..random import call_draws
from ..tensors import LiveBytes, storage_ids, tensors_of


class CallEffects(LiveBytes):
    """drew: whether any call drew random numbers.  statistics: storages of running statistics that were
    updated (a batch norm's schema does not say so, and its version counter does not move)."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False
        self.statistics: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.drew = self.drew or call_draws(func, args, kwargs or {})
        if "batch_norm" in str(func) and "backward" not in str(func):
            self.statistics |= storage_ids(tensors_of(args[3:5]))
        return result
