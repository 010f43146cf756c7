"""Timeline: what happened when, and how much memory was held. Made by the simulator and by the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, overload

import numpy as np

from .columns import Floats


@dataclass(frozen=True, kw_only=True)
class Event:
    """One action on one stream of one rank. Times in seconds from the start of the step.

    stream: "compute", "send", "recv" (time spent waiting for a message), "d2h" and "h2d" (residuals copied to
    the host and back), or "host" (what operations that a user declared do there).
    """

    rank: int
    stream: str
    action: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Lane(NamedTuple):
    """What one rank computes, by start. Times in seconds.

    firsts: entries among which are the first of each kind of action of each stage.
    """

    start: Floats
    end: Floats
    actions: Sequence[str]
    firsts: Sequence[int]


class EventLists(NamedTuple):
    """Events by start, one list for each of their fields. Times in seconds."""

    streams: list[str]
    ranks: list[int]
    actions: list[str]
    starts: list[float]
    ends: list[float]


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


class Curves(Sequence[MemoryCurve]):
    """Device curves of all ranks, and behind them their host curves if there are any, each made when it is
    asked for.

    peaks: device bytes of each rank, known without the curve.
    """

    def __init__(
        self,
        peaks: Sequence[int],
        make: Callable[[int], MemoryCurve],
        make_host: Callable[[int], MemoryCurve] | None = None,
    ) -> None:
        self.peaks = tuple(peaks)
        self._makers = (make,) if make_host is None else (make, make_host)
        self._made: dict[int, MemoryCurve] = {}

    def __len__(self) -> int:
        return len(self._makers) * len(self.peaks)

    @overload
    def __getitem__(self, at: int) -> MemoryCurve: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[MemoryCurve, ...]: ...
    def __getitem__(self, at: int | slice) -> Any:
        place = range(len(self))[at]
        if isinstance(place, range):
            return tuple(self[i] for i in place)
        if place not in self._made:
            tier, rank = divmod(place, len(self.peaks))
            self._made[place] = self._makers[tier](rank)
        return self._made[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Curves | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.peaks)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over a timeline; lists have one entry per rank, times are in seconds.

    end_s: of the last event.  busy_s, wait_s: computing, and waiting for messages or sums.
    first_s, last_s: when a rank's computing begins and ends; infinite for a rank that computes nothing.
    """

    end_s: float
    busy_s: Sequence[float]
    wait_s: Sequence[float]
    first_s: Sequence[float]
    last_s: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of all ranks, or several of a pipeline that does not drain between them.

    source: "predicted" or "measured".  peaks: per rank, bytes by kind at that rank's peak.
    residual_peaks: per rank, the most bytes of residuals at any time, empty where that is not known.
    pairs: actions that run as one unit, each as the texts of its two.
    steps: how many it shows.  steady_s: of several, seconds from one to the next while the pipeline is full.
    """

    source: str
    ranks: int
    events: Sequence[Event]
    memory: Sequence[MemoryCurve] = ()
    peaks: tuple[Mapping[str, int], ...] = field(default=())
    residual_peaks: tuple[int, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    steps: int = 1
    steady_s: float | None = None

    @cached_property
    def totals(self) -> Totals:
        """Sums over the events, in one pass."""
        known = getattr(self.events, "totals", None)  # of a simulation, whose events are arrays
        if known is not None:
            totals: Totals = known(self.ranks)
            return totals
        busy, wait = [0.0] * self.ranks, [0.0] * self.ranks
        first, last = [inf] * self.ranks, [-inf] * self.ranks
        for e in self.events:
            if e.stream == "compute":
                busy[e.rank] += e.duration_s
                first[e.rank] = min(first[e.rank], e.start_s)
                last[e.rank] = max(last[e.rank], e.end_s)
            elif e.stream == "recv":
                wait[e.rank] += e.duration_s
        end_s = max((e.end_s for e in self.events), default=0.0)
        return Totals(end_s=end_s, busy_s=busy, wait_s=wait, first_s=first, last_s=last)

    @cached_property
    def lanes(self) -> Sequence[Lane]:
        """One per rank."""
        known = getattr(self.events, "lanes", None)
        if known is not None:
            lanes: Sequence[Lane] = known()
            return lanes
        rows: list[list[Event]] = [[] for _ in range(self.ranks)]
        for e in sorted(self.events, key=lambda e: e.start_s):
            if e.stream == "compute":
                rows[e.rank].append(e)
        return [
            Lane(
                start=np.array([e.start_s for e in row]),
                end=np.array([e.end_s for e in row]),
                actions=[e.action for e in row],
                firsts=range(len(row)),
            )
            for row in rows
        ]

    def listed(self, streams: Collection[str] = ()) -> EventLists:
        """The events on these streams, or all, by start, without an object for each."""
        known = getattr(self.events, "listed", None)
        if known is not None:
            made: EventLists = known(streams)
            return made
        events = [e for e in self.events if not streams or e.stream in streams]
        events.sort(key=lambda e: (e.start_s, e.end_s))
        names = ("stream", "rank", "action", "start_s", "end_s")
        return EventLists(*([getattr(e, name) for e in events] for name in names))

    @property
    def step_s(self) -> float:
        """Seconds of one step: to the end of the last event, or from one step to the next where the pipeline
        does not drain."""
        return self.end_s if self.steady_s is None else self.steady_s

    @property
    def end_s(self) -> float:
        """Seconds from the start to the end of the last event."""
        return self.totals.end_s

    @cached_property
    def paired(self) -> tuple[tuple[Event, Event], ...]:
        """The events of `pairs`, in the order of time."""
        if not self.pairs:
            return ()
        second = dict(self.pairs)
        wanted = {*second, *second.values()}
        events: dict[str, list[Event]] = {}
        for e in sorted(self.events, key=lambda e: e.start_s):
            if e.stream == "compute" and e.action in wanted:
                events.setdefault(e.action, []).append(e)
        pairs = (zip(events.get(a, ()), events.get(b, ()), strict=False) for a, b in self.pairs)
        return tuple(sorted((pair for both in pairs for pair in both), key=lambda pair: pair[0].start_s))

    @property
    def bubble(self) -> float:
        """Share of a step's rank-time in which nothing is computed.

        >>> one = Event(rank=0, stream="compute", action="0F0", start_s=0.0, end_s=1.0)
        >>> two = Event(rank=1, stream="compute", action="1F0", start_s=1.0, end_s=2.0)
        >>> Timeline(source="predicted", ranks=2, events=(one, two)).bubble
        0.5
        """
        whole = self.ranks * self.step_s * self.steps
        return 1.0 - sum(self.totals.busy_s) / whole if whole else 0.0

    @property
    def rank_peaks(self) -> tuple[int, ...]:
        """The most bytes that each rank holds on its device."""
        return tuple(self.peak_bytes(rank) for rank in range(self.ranks))

    def peak_bytes(self, rank: int, tier: str = "device") -> int:
        """The most that a rank holds in one tier, "device" or "host"; 0 where nothing is known of it."""
        if isinstance(self.memory, Curves) and tier == "device":
            return self.memory.peaks[rank]
        curves = self.memory[self.ranks :] if isinstance(self.memory, Curves) else self.memory
        return max((c.peak_bytes for c in curves if c.rank == rank and c.tier == tier), default=0)
