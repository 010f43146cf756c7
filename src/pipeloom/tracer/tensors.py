"""Small helpers for tensors that every part of the tracer needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
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
