"""Refuses models of which two tensors lie in the same memory and one of them learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ir.errors import CaptureError
from ..ir.user_code import at, own_definition
from .tensors import StorageView, tensors_of


def refuse_shared_memory(model: nn.Module) -> None:
    """Ranks know that two names are tied if they name one tensor, not if two lie in the same memory.

    Raises: CaptureError for a parameter that learns and another tensor that has some of its elements, be it
        in a plain attribute.
    """
    in_storage: dict[int, list[tuple[range, str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *_in_attributes(model)):
        if tensor.numel() and tensor.layout is torch.strided:
            storage = StorageView.of(tensor).storage
            in_storage.setdefault(storage, []).append((_bytes_of(tensor), name, tensor))
    for tensors in in_storage.values():
        tensors.sort(key=lambda item: item[0].start)
        for number, (span, name, tensor) in enumerate(tensors):
            for other_span, other, second in tensors[number + 1 :]:
                if other_span.start >= span.stop:
                    break
                learns = tensor.requires_grad or second.requires_grad
                if learns and tensor is not second and _share_elements(tensor, second):
                    first, last = (name, other) if tensor.requires_grad else (other, name)
                    raise CaptureError(
                        f"{first} and {last} of {type(model).__name__}{at(own_definition(type(model)))} are "
                        "two tensors in the same memory: of two ranks each would change its own",
                        hint=f"make them one, as in self.b.weight = self.a.weight, or {last} in the forward",
                    )


def _bytes_of(tensor: Tensor) -> range:
    """From the first to the last byte of its storage that a tensor has."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = tensor.storage_offset() * tensor.element_size(), tensor.element_size()
    return range(start, start + (last + 1) * size)


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Of two tensors whose bytes overlap, whether some are in both: not if their rows alternate."""
    if first.element_size() != second.element_size():
        return True
    start = min(first.storage_offset(), second.storage_offset())
    stop = max(_bytes_of(first).stop, _bytes_of(second).stop) // first.element_size()
    taken = torch.zeros(stop - start, dtype=torch.bool)
    taken.as_strided(first.shape, first.stride(), first.storage_offset() - start).fill_(True)
    return bool(taken.as_strided(second.shape, second.stride(), second.storage_offset() - start).any())


def plain_attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Of attributes that may hold tensors, and are neither parameters nor buffers: the module's name, the
    module, the attribute's name, and what it is."""
    usual = vars(nn.Module()).keys()
    for prefix, module in model.named_modules():
        for key, value in [*vars(module).items()]:
            if key not in usual and isinstance(value, Tensor | list | tuple | dict):
                yield prefix, module, key, value


def _in_attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in plain attributes, but for those that PyTorch's weight and spectral norm make anew."""
    for prefix, module, key, value in plain_attributes(model):
        if module._parameters.keys().isdisjoint((f"{key}_orig", f"{key}_v")):
            name = f"{prefix}.{key}" if prefix else key
            yield from ((name, tensor) for tensor in tensors_of(value))
