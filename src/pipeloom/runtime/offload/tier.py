"""Tiers: where residuals go while their micro-batch waits for its backward.

A `Trip` is one micro-batch's residuals on their way there and back. It begins in front of the caller's eyes
and goes on beside the computation:

    leave -> is away -> come back -> arrived
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...tracer import Slot, Tensors


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a tensor lies in its storage, to be built again around the same bytes."""

    slot: Slot
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int

    @staticmethod
    def of(slot: Slot, tensor: Tensor) -> Layout:
        return Layout(
            slot=slot,
            dtype=tensor.dtype,
            device=tensor.device,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            bytes=tensor.untyped_storage().nbytes(),
        )

    def around(self, raw: Tensor) -> Tensor:
        """The tensor whose storage is that of `raw`."""
        whole = torch.empty(0, dtype=self.dtype, device=raw.device)
        return whole.set_(raw.untyped_storage(), self.offset, self.size, self.stride)


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())


@dataclass(eq=False)
class Trip:
    """One micro-batch's residuals under way. bytes: of their storages.

    left, returned: marks of the recorder's clock, start and end of the copy to the tier and of that back;
    known once it has ended.
    """

    layouts: tuple[Layout, ...]
    left: tuple[object, object] | None = None
    returned: tuple[object, object] | None = None

    @property
    def bytes(self) -> int:
        return sum(layout.bytes for layout in self.layouts)


class Tier(Protocol):
    """A place for residuals. Copies to it follow each other in order, and so do copies from it.

    held_bytes, peak_bytes: there now, and at most; from the start of the copy to the end of the copy back.
    """

    held_bytes: int
    peak_bytes: int

    def leave(self, action: str, residuals: Tensors) -> Trip:
        """Begin to copy residuals, and take them: `residuals` is emptied, and they are free once copied.

        action: for messages.
        Raises: OffloadError if there is no room for them.
        """
        ...

    def is_away(self, trip: Trip) -> bool:
        """Whether the device is rid of them. Raises: OffloadError if the copy failed."""
        ...

    def finish_leaving(self, trip: Trip, check: Callable[[], None]) -> None:
        """Wait until they are away; `check` is called now and then and may raise. Raises as `is_away`."""
        ...

    def come_back(self, trip: Trip) -> None:
        """Begin to copy back, once they are away."""
        ...

    def arrived(self, trip: Trip, check: Callable[[], None]) -> Tensors:
        """Wait until they are back; `check` is called now and then and may raise.

        Raises: OffloadError if they could not be read.
        """
        ...

    def give_up(self, trip: Trip) -> None:
        """Nobody will take what comes back, if it was asked for: its place is free again, sooner or later."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
