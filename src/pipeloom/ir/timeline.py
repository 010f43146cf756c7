"""Timeline: what happened when, and how much memory was held. Made by the simulator and by the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Event:
    """One action on one stream of one rank. Times in seconds from the start of the step.

    stream: "compute", "send", "recv" (time spent waiting for a message) or "host".
    """

    rank: int
    stream: str
    action: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Bytes held by one rank in one tier ("device" or "host"), as steps: `sizes[i]` from `times_s[i]` on."""

    rank: int
    tier: str = "device"
    times_s: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.sizes, default=0)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of all ranks.

    source: "predicted" or "measured".  peaks: per rank, bytes by kind at that rank's peak.
    """

    source: str
    ranks: int
    events: tuple[Event, ...]
    memory: tuple[MemoryCurve, ...] = ()
    peaks: tuple[Mapping[str, int], ...] = field(default=())

    @property
    def step_s(self) -> float:
        """Seconds from the start to the end of the last event."""
        return max((e.end_s for e in self.events), default=0.0)

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(e.duration_s for e in self.events if e.rank == rank and e.stream == "compute")

    @property
    def bubble(self) -> float:
        """Share of rank-time in which nothing is computed, until the last rank ends.

        >>> one = Event(rank=0, stream="compute", action="0F0", start_s=0.0, end_s=1.0)
        >>> two = Event(rank=1, stream="compute", action="1F0", start_s=1.0, end_s=2.0)
        >>> Timeline(source="predicted", ranks=2, events=(one, two)).bubble
        0.5
        """
        if not self.events:
            return 0.0
        busy = sum(self.busy_s(rank) for rank in range(self.ranks))
        return 1.0 - busy / (self.ranks * self.step_s)

    def peak_bytes(self, rank: int) -> int:
        """Largest device memory of a rank."""
        return max((c.peak_bytes for c in self.memory if c.rank == rank and c.tier == "device"), default=0)
