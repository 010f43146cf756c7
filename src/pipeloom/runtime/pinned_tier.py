"""Residuals of an accelerator in pinned host memory, copied on two streams beside the computation.

Host memory is pinned once, in chunks that any residuals use again: pinning takes far longer than a copy.

The host issues kernels far ahead of the device and waits for no copy. Order on the device: a copy away waits
for the computation so far, so also for the copies back that it waited for; hence chunks that `take`
freed may be written at once. What is copied away is kept until `leave`, where the computation waits
for the copy: its memory is free for whatever is computed from then on. A copy back waits for the computation
so far, which may still read the memory that is to be filled, and the computation waits for it in
`take`. So all memory is taken and freed in the order of the computing stream, and none needs
`record_stream`, after which it would be free at times that no plan knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ir.cluster import MiB
from ..ir.errors import OffloadError
from ..ir.text import format_bytes
from ..tracer.stage.functions import Tensors
from .recorder import DeviceClock
from .tier import Copy, TensorLayout, bytes_of, layouts_of

ALIGNED = 512
"""Bytes at whose multiples tensors begin on the host."""

CHUNK = 16 * MiB
"""Bytes pinned at once. PyTorch pins the next power of two, so that a gigabyte and a bit would take two."""


@dataclass(eq=False, kw_only=True)
class PinnedCopy(Copy):
    """host: its chunks.  leaving, reloading: what is copied now.
    on_host: what is in the host's memory anyway, as the seeds that attention keeps.
    """

    tier: PinnedTier
    host: list[Tensor] = field(default_factory=list)
    leaving: Tensors = field(default_factory=dict)
    reloading: Tensors = field(default_factory=dict)
    on_host: Tensors = field(default_factory=dict)

    def gone(self) -> bool:
        if self.leaving and _reached(self.offload_span[1]):
            self.leaving.clear()
        return not self.leaving

    def leave(self, check: Callable[[], None]) -> None:
        """Only the computing stream waits, not the host."""
        if self.leaving:
            torch.accelerator.current_stream().wait_event(self.offload_span[1])
            self.leaving.clear()

    def reload(self) -> None:
        self.leave(lambda: None)
        self.tier.copy_back(self)

    def take(self, check: Callable[[], None]) -> Tensors:
        """Only the computing stream waits, not the host."""
        torch.accelerator.current_stream().wait_event(self.reload_span[1])
        residuals = {layout.slot: layout.around(self.reloading[layout.slot]) for layout in self.layouts}
        residuals |= self.on_host
        self.tier.free_chunks(self)
        return residuals

    def discard(self) -> None:
        """Waits for its copies, after which others may write to its chunks."""
        for span in filter(None, (self.offload_span, self.reload_span)):
            span[1].synchronize()
        self.tier.free_chunks(self)

    def pieces(self) -> Iterator[tuple[TensorLayout, slice, Tensor]]:
        """Each tensor in pieces: its layout, where the piece is in its bytes, and the part of a chunk for it.

        tensors   |  a  |      b      | c |        laid end to end, each from a multiple of ALIGNED on,
        chunks    |    0    |    1    |    2    |  so a tensor may go on in the next chunk
        """
        begin = 0
        for layout in self.layouts:
            done = 0
            while done < layout.bytes:
                chunk, at = divmod(begin + done, CHUNK)
                size = min(layout.bytes - done, CHUNK - at)
                yield layout, slice(done, done + size), self.host[chunk][at : at + size]
                done += size
            begin += _aligned(layout.bytes)


class PinnedTier:
    """See `Tier`."""

    def __init__(self, rank: int) -> None:
        self.used_bytes = 0
        self._rank = rank
        self._out, self._in = _stream(), _stream()
        self._idle_chunks: list[Tensor] = []
        self._reloading: set[PinnedCopy] = set()  # kept from being freed under a copy if the run is given up

    def offload(self, action: str, residuals: Tensors) -> PinnedCopy:
        on_host = {slot: residuals.pop(slot) for slot in list(residuals) if not _on_device(residuals[slot])}
        copy = PinnedCopy(tier=self, action=action, layouts=layouts_of(residuals), on_host=on_host)
        copy.host = self._allocate(sum(_aligned(layout.bytes) for layout in copy.layouts), action)
        self._out.wait_stream(torch.accelerator.current_stream())
        with self._out:
            begin = DeviceClock.mark()
            for layout, span, part in copy.pieces():
                part.copy_(bytes_of(residuals[layout.slot])[span], non_blocking=True)
            copy.offload_span = (begin, DeviceClock.mark())
        copy.leaving = dict(residuals)
        residuals.clear()
        self.used_bytes += copy.bytes
        return copy

    def copy_back(self, copy: PinnedCopy) -> None:
        """The memory is taken on the computing stream: it is memory that the computation is done with."""
        for layout in copy.layouts:
            copy.reloading[layout.slot] = torch.empty(layout.bytes, dtype=torch.uint8, device=layout.device)
        self._reloading.add(copy)
        self._in.wait_stream(torch.accelerator.current_stream())
        with self._in:
            begin = DeviceClock.mark()
            for layout, span, part in copy.pieces():
                copy.reloading[layout.slot][span].copy_(part, non_blocking=True)
            copy.reload_span = (begin, DeviceClock.mark())

    def free_chunks(self, copy: PinnedCopy) -> None:
        copy.leaving, copy.reloading, copy.on_host = {}, {}, {}
        self._reloading.discard(copy)
        self.used_bytes -= copy.bytes
        self._idle_chunks += copy.host
        copy.host = []

    def close(self) -> None:
        """A device that has failed copies nothing any more; whoever waited for it has said so."""
        for stream in (self._out, self._in):
            with suppress(RuntimeError):  # how PyTorch reports the device's failure, again at every call
                stream.synchronize()
        self._reloading.clear()
        self._idle_chunks.clear()

    def _allocate(self, size: int, action: str) -> list[Tensor]:
        """Pinned chunks: idle ones, then new ones."""
        count = -(-size // CHUNK)
        try:
            while len(self._idle_chunks) < count:
                self._idle_chunks.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            raise OffloadError(
                f"rank {self._rank} cannot pin {format_bytes(size)} of host memory at {action}: {error}; "
                f"{format_bytes(self.used_bytes)} of residuals are there",
                hint="plan with fewer offloaded residuals, or with more host memory",
            ) from None
        return [self._idle_chunks.pop() for _ in range(count)]


# The tests' accelerator takes the place of these three.


def _stream() -> torch.Stream:
    return torch.Stream()


def _reached(event: torch.Event) -> bool:
    return event.query()


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
