"""Requests for links that are shared: a heap, the earliest on top."""

from __future__ import annotations

from ..ir.kernels import kernel
from .loop_state import State


@kernel
def before(time: float, entry: int, other_time: float, other_entry: int) -> bool:
    """Whether one request goes before another: by time, then by entry."""
    return bool(time < other_time or (time == other_time and entry < other_entry))


@kernel
def request(s: State, time: float, entry: int) -> None:
    """Add a request to the heap."""
    times, entries, at = s.queue.time, s.queue.entry, s.queue.size[0]
    s.queue.size[0] += 1
    while at and before(time, entry, times[(at - 1) // 2], entries[(at - 1) // 2]):
        times[at], entries[at] = times[(at - 1) // 2], entries[(at - 1) // 2]
        at = (at - 1) // 2
    times[at], entries[at] = time, entry


@kernel
def drop_first(s: State) -> None:
    """Take the earliest request from the heap."""
    s.queue.size[0] -= 1
    times, entries, size, at = s.queue.time, s.queue.entry, s.queue.size[0], 0
    time, entry = times[size], entries[size]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and before(times[child + 1], entries[child + 1], times[child], entries[child]):
            child += 1
        if not before(times[child], entries[child], time, entry):
            break
        times[at], entries[at] = times[child], entries[child]
        at = child
    times[at], entries[at] = time, entry
