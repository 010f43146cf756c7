"""Recorder: when each action of a step started and ended, on the device's own clock."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch

from ..ir.timeline import Event, MemoryCurve


class Clock(Protocol):
    """Marks moments; `seconds` tells how far apart two are, once the device has reached them."""

    def mark(self) -> object: ...

    def seconds(self, start: object, end: object) -> float: ...


class HostClock:
    """For devices that compute in the calling thread."""

    def mark(self) -> object:
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return end - start


class CudaClock:
    """Events on the current stream. CUDA gives the time between two of them in float32, as milliseconds: only
    of events that are near each other is it exact to microseconds, so there is no zero for a whole run."""

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


class _StepStart(NamedTuple):
    """How many entries of each list there were when a step began, and when that was."""

    marks: int
    levels: int
    host_levels: int
    late: int
    zero: object
    started_s: float


class Recorder:
    """Events and memory levels of one rank's last step, or of its last few."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.rank = rank
        self.clock = clock
        self.begin()

    def begin(self) -> None:
        """Start a new step; times count from here. started_s: on the clock of this machine."""
        self.started_s = time.perf_counter()
        self.zero = self.clock.mark()
        self.marks: list[tuple[str, str, object, object]] = []
        self.levels: list[tuple[object, int]] = []
        self.host_levels: list[tuple[object, int]] = []
        self.late: list[tuple[object, object, int]] = []
        self._steps = [_StepStart(0, 0, 0, 0, self.zero, self.started_s)]

    def next_step(self, *, keep: int) -> None:
        """Start another step without forgetting those before it: at most `keep` of them are kept, the new one
        included. Times count from the oldest."""
        now = time.perf_counter()
        counts = len(self.marks), len(self.levels), len(self.host_levels), len(self.late)
        self._steps.append(_StepStart(*counts, self.clock.mark(), now))
        if len(self._steps) <= keep:
            return
        first = self._steps[-keep]
        self.marks, self.levels = self.marks[first.marks :], self.levels[first.levels :]
        self.host_levels, self.late = self.host_levels[first.host_levels :], self.late[first.late :]
        self.zero, self.started_s = first.zero, first.started_s
        self._steps = [
            _StepStart(
                step.marks - first.marks,
                step.levels - first.levels,
                step.host_levels - first.host_levels,
                step.late - first.late,
                step.zero,
                step.started_s,
            )
            for step in self._steps[-keep:]
        ]

    @property
    def step_starts_s(self) -> list[float]:
        """When each step that is kept began, counted from the oldest."""
        return [self._since_zero(step.zero) for step in self._steps]

    def events_of_last_step(self) -> tuple[Event, ...]:
        """Its times count from its own start."""
        last, seconds = self._steps[-1], self.clock.seconds
        return tuple(
            Event(
                rank=self.rank,
                stream=stream,
                action=action,
                start_s=seconds(last.zero, start),
                end_s=seconds(last.zero, end),
            )
            for stream, action, start, end in self.marks[last.marks :]
        )

    @contextmanager
    def record(self, stream: str, action: str) -> Iterator[None]:
        start = self.clock.mark()
        yield
        self.marks.append((stream, action, start, self.clock.mark()))

    def copied(self, stream: str, action: str, start: object, end: object) -> None:
        """A copy ran beside the actions, between two marks."""
        self.marks.append((stream, action, start, end))

    def burst(self, size: int) -> None:
        """During the action recorded last, up to `size` bytes were held."""
        self.levels.append((self.marks[-1][2], size))

    def level(self, size: int) -> None:
        """The rank holds `size` bytes from now on."""
        self.levels.append((self.clock.mark(), size))

    def freed(self, size: int, when: object) -> None:
        """The rank notices now that it has not held `size` bytes since the mark `when`."""
        self.late.append((when, self.clock.mark(), size))

    def host_level(self, size: int) -> None:
        """The rank has `size` bytes of residuals on the host from now on."""
        self.host_levels.append((self.clock.mark(), size))

    def events(self, late_s: float = 0.0) -> tuple[Event, ...]:
        """late_s: how much later than the first rank this one began; times count from that rank's start."""
        at = self._since_zero
        return tuple(
            Event(rank=self.rank, stream=stream, action=action, start_s=at(a) + late_s, end_s=at(b) + late_s)
            for stream, action, a, b in self.marks
        )

    def curve(self, late_s: float = 0.0) -> MemoryCurve:
        """Of the device. late_s: as in `events`."""
        return self._curve("device", self._corrected(), late_s)

    def host_curves(self, late_s: float = 0.0) -> tuple[MemoryCurve, ...]:
        """Of offloaded residuals; none if there were none. late_s: as in `events`."""
        return (self._curve("host", self._timed(self.host_levels), late_s),) if self.host_levels else ()

    def _since_zero(self, mark: object) -> float:
        return self.clock.seconds(self.zero, mark)

    def _timed(self, levels: list[tuple[object, int]]) -> list[tuple[float, int]]:
        return [(self._since_zero(mark), size) for mark, size in levels]

    def _corrected(self) -> list[tuple[float, int]]:
        """Levels of the device without the bytes that were still counted when they were gone."""
        levels = self._timed(self.levels)
        for gone, noticed, size in self.late:
            begin, end = self._since_zero(gone), self._since_zero(noticed)
            levels = [(at, level - size if begin <= at < end else level) for at, level in levels]
            place = bisect_left(levels, begin, key=itemgetter(0))
            if place:
                levels.insert(place, (begin, levels[place - 1][1] - size))
        return levels

    def _curve(self, tier: str, levels: list[tuple[float, int]], late_s: float) -> MemoryCurve:
        return MemoryCurve(
            rank=self.rank,
            tier=tier,
            times_s=tuple(max(0.0, at + late_s) for at, _ in levels),
            sizes=tuple(size for _, size in levels),
        )
