"""Residuals of a CUDA rank in pinned host memory, copied on two streams beside the computation.

Host buffers are pinned once and used again for residuals of the same size: pinning takes far longer than a
copy. Nothing here waits for the device but `leave`, and only for the copy before the last: the host issues
kernels far ahead of the device, and would otherwise ask for the memory of several micro-batches before the
copies have given any back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ir.errors import OffloadError
from ..ir.units import format_bytes
from ..tracer.stage import Tensors
from .tiers import Layout, Trip, bytes_of

ALIGNED = 512
"""Bytes at whose multiples tensors begin in a host buffer."""


@dataclass(eq=False)
class CudaTrip(Trip):
    """host: the buffer.  away, back: events behind the copies.  landed: what is being copied back."""

    host: Tensor = field(default_factory=lambda: torch.empty(0))
    away: torch.cuda.Event | None = None
    back: torch.cuda.Event | None = None
    landed: Tensors = field(default_factory=dict)

    def spans(self) -> list[tuple[Layout, Tensor]]:
        """Each tensor and its part of the buffer."""
        found, at = [], 0
        for layout in self.layouts:
            found.append((layout, self.host[at : at + layout.bytes]))
            at += _aligned(layout.bytes)
        return found


class CudaTier:
    """See `Tier`. Marks of trips are events, as those of `CudaClock` are."""

    def __init__(self, rank: int) -> None:
        self.held_bytes = self.peak_bytes = 0
        self._rank = rank
        self._out, self._in = _stream(), _stream()
        self._free: dict[int, list[tuple[torch.cuda.Event, Tensor]]] = {}
        self._last: CudaTrip | None = None

    def leave(self, action: str, residuals: Tensors) -> CudaTrip:
        layouts = tuple(Layout.of(slot, tensor) for slot, tensor in residuals.items())
        trip = CudaTrip(layouts)
        trip.host = self._take(sum(_aligned(layout.bytes) for layout in layouts), action)
        if self._last is not None and self._last.away is not None:
            self._last.away.synchronize()
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            begin = _mark()
            for (_, part), tensor in zip(trip.spans(), residuals.values(), strict=True):
                part.copy_(bytes_of(tensor), non_blocking=True)
                tensor.record_stream(self._out)  # its memory is not used again before the copy has ended
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
        assert isinstance(trip, CudaTrip)
        for layout in trip.layouts:
            raw = torch.empty(layout.bytes, dtype=torch.uint8, device=layout.device)
            raw.record_stream(self._in)
            trip.landed[layout.slot] = raw
        assert trip.away is not None
        self._in.wait_event(trip.away)
        self._in.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._in):
            begin = _mark()
            for layout, part in trip.spans():
                trip.landed[layout.slot].copy_(part, non_blocking=True)
            trip.back = _mark()
        trip.returned = (begin, trip.back)

    def arrived(self, trip: Trip, check: Callable[[], None]) -> Tensors:
        """Only the computing stream waits, not the host."""
        assert isinstance(trip, CudaTrip)
        assert trip.back is not None
        torch.cuda.current_stream().wait_event(trip.back)
        found = {layout.slot: layout.around(trip.landed[layout.slot]) for layout in trip.layouts}
        trip.landed = {}
        self.held_bytes -= trip.bytes
        self._free.setdefault(len(trip.host), []).append((trip.back, trip.host))
        return found

    def close(self) -> None:
        for stream in (self._out, self._in):
            stream.synchronize()
        self._free.clear()

    def _take(self, size: int, action: str) -> Tensor:
        """A pinned buffer whose last copy back has ended, or a new one."""
        known = self._free.get(size, [])
        for index, (back, _) in enumerate(known):
            if _passed(back):
                return known.pop(index)[1]
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise OffloadError(
                f"rank {self._rank} cannot pin {format_bytes(size)} of host memory at {action}: {error}; "
                f"{format_bytes(self.held_bytes)} of residuals are there",
                hint="plan with fewer offloaded residuals, or with more host memory",
            ) from None


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
