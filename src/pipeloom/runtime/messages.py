"""Messages between ranks, and their bytes on the wire.

A message is the list of values that one SEND carries. Each travels by itself. The receiver has one flat
buffer for all, each value starting at a multiple of 64 bytes, so that it hands out typed views and copies
nothing. A value lies in it as in one process, its dimensions in the same order (`tracer.tensors`):

    values   h: float32[3]          mask: bool[5]
    bytes    0 ....... 12 (gap) ... 64 ..... 69
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..ir.graph import Value
from ..tracer.tensors import DimOrder, copy_in_order, has_order, permute_to_memory, view_in_order

ALIGNMENT = 64
"""Bytes: a cache line, and enough for every dtype."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one SEND carries from one rank to another.

    key: text of the SEND, such as "0SEND_F2>1"; unique within a step.
    source, target: ranks within the pipeline's group.

    >>> m = Message(key="0SEND_F2>1", source=0, target=1, values=(
    ...     Value(name="h", shape=(3,), dtype="float32"), Value(name="mask", shape=(5,), dtype="bool")))
    >>> m.offsets, m.bytes
    ((0, 64), 69)
    """

    key: str
    source: int
    target: int
    values: tuple[Value, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each value."""
        return tuple(value.bytes for value in self.values)

    @cached_property
    def sent_bytes(self) -> int:
        """Of all values, without the gaps between them in the receiver's buffer."""
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each value starts, in bytes."""
        starts, end = [], 0
        for value in self.values:
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
            end = starts[-1] + value.bytes
        return tuple(starts)

    @cached_property
    def bytes(self) -> int:
        """Of the receiver's buffer: up to the end of the last value."""
        return self.offsets[-1] + self.values[-1].bytes if self.values else 0

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(getattr(torch, value.dtype) for value in self.values)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors are what it announces."""
        announced = [(value.shape, dtype) for value, dtype in zip(self.values, self.dtypes, strict=True)]
        return [(tensor.shape, tensor.dtype) for tensor in tensors] == announced


def as_bytes(tensor: Tensor, order: DimOrder) -> Tensor:
    """A tensor as flat bytes, as they lie in memory if its dimensions have this order; else a copy of it."""
    lying = tensor.detach() if has_order(tensor, order) else copy_in_order(tensor.detach(), order)
    return permute_to_memory(lying, order).view(-1).view(torch.uint8)


def unpack(message: Message, buffer: Tensor) -> list[Tensor]:
    """The values as typed views of a flat buffer of `message.bytes` bytes."""
    return [
        view_in_order(buffer[start : start + value.bytes].view(dtype), value.shape, value.order)
        for value, start, dtype in zip(message.values, message.offsets, message.dtypes, strict=True)
    ]
