"""Tiers: where residuals go while their micro-batch waits for its backward.

A `Copy` is one micro-batch's residuals on their way there and back, beside the computation:

    OFFLOAD ─────── gone? ─────────▶ RELOAD ─────────▶ backward
    tier.offload    leave (AWAIT)    reload            take ─▶ residuals      discard: a step broken off
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..tracer.stage.functions import Slot, Tensors
from ..tracer.tensors import StorageView


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor looks at its storage, of so many bytes, to be built again around the same ones."""

    slot: Slot
    view: StorageView
    device: torch.device
    bytes: int

    def around(self, raw: Tensor) -> Tensor:
        """The tensor whose storage is that of `raw` (uint8, `bytes` long)."""
        return self.view.on(raw.untyped_storage())


def layouts_of(residuals: Tensors) -> tuple[TensorLayout, ...]:
    return tuple(
        TensorLayout(slot, StorageView.of(tensor), tensor.device, tensor.untyped_storage().nbytes())
        for slot, tensor in residuals.items()
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as flat uint8, without a copy."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())


@dataclass(eq=False, kw_only=True)
class Copy(ABC):
    """One micro-batch's residuals on a tier, or on their way there or back.

    action: the text of the OFFLOAD.  reload_action: of the RELOAD, once it has run.
    layouts: how they looked at their storages, those that were copied.
    offload_span, reload_span: marks of the recorder's clock, start and end of the copy to the tier and of
    the copy back; None until that is known, at the latest once that copy has ended.
    off_device: whether the rank has seen that they have left the device.
    """

    action: str
    layouts: tuple[TensorLayout, ...]
    reload_action: str = ""
    offload_span: Any = None
    reload_span: Any = None
    off_device: bool = False

    @property
    def bytes(self) -> int:
        """Of the tensors' storages."""
        return sum(layout.bytes for layout in self.layouts)

    @abstractmethod
    def gone(self) -> bool:
        """Whether they have left the device; never blocks.

        Raises: OffloadError if the copy failed.
        """

    @abstractmethod
    def leave(self, check: Callable[[], None]) -> None:
        """What comes next may take their room: whoever runs it, this thread or a device, waits for the copy.

        check: called now and then by a thread that waits, and may raise.  Raises: as `gone`.
        """

    @abstractmethod
    def reload(self) -> None:
        """Begin to copy back, behind the copy there."""

    @abstractmethod
    def take(self, check: Callable[[], None]) -> Tensors:
        """Wait until they are back; `check` is called now and then and may raise.

        Raises: OffloadError if they could not be written or read.
        """

    @abstractmethod
    def discard(self) -> None:
        """Nobody will take what comes back, if it was asked for: its memory is freed, sooner or later."""


class Tier(Protocol):
    """Memory for residuals beside the device's. Copies to it follow each other, and so do copies back.

    used_bytes: there now, each from the start of the copy to the end of the copy back.
    """

    used_bytes: int

    def offload(self, action: str, residuals: Tensors) -> Copy:
        """Begin to copy residuals, and take them: `residuals` is emptied, and they are free once copied.

        action: the OFFLOAD, for messages.
        Raises: OffloadError if there is no room for them.
        """

    def close(self) -> None:
        """End all copies and free everything. Called once or more."""
