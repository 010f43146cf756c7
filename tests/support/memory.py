"""How much memory PyTorch's allocator really handed out: an independent witness for tests of memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocated:
    """Bytes above the level at the start: the most at once, and at the end."""

    peak: int = 0
    end: int = 0


@contextmanager
def allocations() -> Iterator[Allocated]:
    """Watch the CPU allocator while the block runs; the figures are there once it has ended."""
    found = Allocated()
    gc.collect()  # what earlier tests left must not be freed inside
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield found
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        found.end += event.nbytes()
        found.peak = max(found.peak, found.end)
