"""Residuals of a CUDA rank in pinned host memory, copied on two streams beside the computation.

Host memory is pinned once, in chunks that any residuals use again: pinning takes far longer than a copy. The
host issues kernels far ahead of the device. It waits here so as not to ask for more memory than a plan counts
on: in `leave` until the copy before has given back its own, in `come_back` until the memory of the same
residuals is free.

Order on the device: a copy away waits for the computation so far, so also for the copies back that it waited
for; hence chunks that `arrived` gave back may be written at once. A copy back waits for the computation so
far, which may still read the memory that is to be filled, and the computation waits for it in `arrived`;
hence that memory needs no `record_stream`, which would keep it, once freed, until all *later* copies on that
stream have ended. What is copied away does need it: it is freed before its copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...ir.cluster import MiB
from ...ir.errors import OffloadError
from ...ir.units import format_bytes
from ...tracer import Tensors
from .tier import Layout, Trip, bytes_of

ALIGNED = 512
"""Bytes at whose multiples tensors begin on the host."""

CHUNK = 16 * MiB
"""Bytes pinned at once. PyTorch pins the next power of two, so that a gigabyte and a bit would take two."""


@dataclass(eq=False)
class CudaTrip(Trip):
    """host: its chunks.  away, back: events behind the copies.  landed: what is being copied back.

    stayed: what is in the host's memory anyway, as the seeds that attention keeps.
    """

    host: list[Tensor] = field(default_factory=list)
    away: torch.cuda.Event | None = None
    back: torch.cuda.Event | None = None
    landed: Tensors = field(default_factory=dict)
    stayed: Tensors = field(default_factory=dict)

    @property
    def host_bytes(self) -> int:
        return sum(_aligned(layout.bytes) for layout in self.layouts)

    def pieces(self) -> Iterator[tuple[Layout, slice, Tensor]]:
        """Each tensor in pieces: where its bytes are in it, and their part of a chunk."""
        begin = 0
        for layout in self.layouts:
            done = 0
            while done < layout.bytes:
                chunk, at = divmod(begin + done, CHUNK)
                size = min(layout.bytes - done, CHUNK - at)
                yield layout, slice(done, done + size), self.host[chunk][at : at + size]
                done += size
            begin += _aligned(layout.bytes)


class CudaTier:
    """See `Tier`. Marks of trips are events, as those of `CudaClock` are.

    pinned_bytes: of host memory, used now or not.
    """

    def __init__(self, rank: int) -> None:
        self.held_bytes = self.peak_bytes = self.pinned_bytes = 0
        self._rank = rank
        self._out, self._in = _stream(), _stream()
        self._free: list[Tensor] = []
        self._coming: set[CudaTrip] = set()  # kept from being freed under a copy if the run is given up
        self._last: CudaTrip | None = None

    def leave(self, action: str, residuals: Tensors) -> CudaTrip:
        stayed = {slot: residuals.pop(slot) for slot in list(residuals) if not _on_device(residuals[slot])}
        layouts = tuple(Layout.of(slot, tensor) for slot, tensor in residuals.items())
        trip = CudaTrip(layouts, stayed=stayed)
        trip.host = self._take(trip.host_bytes, action)
        if self._last is not None and self._last.away is not None:
            self._last.away.synchronize()
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            begin = _mark()
            for layout, span, part in trip.pieces():
                part.copy_(bytes_of(residuals[layout.slot])[span], non_blocking=True)
            for tensor in residuals.values():
                tensor.record_stream(self._out)
            trip.away = _mark()
        trip.left = (begin, trip.away)
        residuals.clear()
        self._last = trip
        self.held_bytes += trip.bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return trip

    def is_away(self, trip: Trip) -> bool:
        assert isinstance(trip, CudaTrip)
        return trip.away is not None and _passed(trip.away)

    def finish_leaving(self, trip: Trip, check: Callable[[], None]) -> None:
        assert isinstance(trip, CudaTrip) and trip.away is not None
        trip.away.synchronize()

    def come_back(self, trip: Trip) -> None:
        """The memory is taken on the computing stream: it is memory that the computation is done with."""
        assert isinstance(trip, CudaTrip) and trip.away is not None
        trip.away.synchronize()
        for layout in trip.layouts:
            trip.landed[layout.slot] = torch.empty(layout.bytes, dtype=torch.uint8, device=layout.device)
        self._coming.add(trip)
        self._in.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._in):
            begin = _mark()
            for layout, span, part in trip.pieces():
                trip.landed[layout.slot][span].copy_(part, non_blocking=True)
            trip.back = _mark()
        trip.returned = (begin, trip.back)

    def arrived(self, trip: Trip, check: Callable[[], None]) -> Tensors:
        """Only the computing stream waits, not the host."""
        assert isinstance(trip, CudaTrip)
        assert trip.back is not None
        torch.cuda.current_stream().wait_event(trip.back)
        found = {layout.slot: layout.around(trip.landed[layout.slot]) for layout in trip.layouts}
        found |= trip.stayed
        self._give_back(trip)
        return found

    def give_up(self, trip: Trip) -> None:
        """Waits for its copies, after which others may write to its chunks."""
        assert isinstance(trip, CudaTrip)
        for event in (trip.away, trip.back):
            if event is not None:
                event.synchronize()
        self._give_back(trip)

    def _give_back(self, trip: CudaTrip) -> None:
        trip.landed, trip.stayed = {}, {}
        self._coming.discard(trip)
        self.held_bytes -= trip.bytes
        self._free += trip.host
        trip.host = []

    def close(self) -> None:
        """A device that has failed copies nothing any more; whoever waited for it has said so."""
        for stream in (self._out, self._in):
            with suppress(RuntimeError):  # how torch.cuda reports the device's failure, again at every call
                stream.synchronize()
        self._last = None
        self._coming.clear()
        self._free.clear()

    def _take(self, size: int, action: str) -> list[Tensor]:
        """Chunks for so many bytes: those used before, and new ones."""
        count = -(-size // CHUNK)
        try:
            while len(self._free) < count:
                self._free.append(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True))
                self.pinned_bytes += CHUNK
        except RuntimeError as error:
            raise OffloadError(
                f"rank {self._rank} cannot pin {format_bytes(size)} of host memory at {action}: {error}; "
                f"{format_bytes(self.held_bytes)} of residuals are there",
                hint="plan with fewer offloaded residuals, or with more host memory",
            ) from None
        return [self._free.pop() for _ in range(count)]


def _on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
