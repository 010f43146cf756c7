"""Recorder: when each action of a step started and ended, on the device's own clock."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

import torch

from ..ir.timeline import Event, MemoryCurve


class Clock(Protocol):
    """Marks moments; `seconds` tells how far apart two are, once the device has reached them."""

    def mark(self) -> object: ...

    def seconds(self, start: object, end: object) -> float: ...


class HostClock:
    mark = staticmethod(time.perf_counter)

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return end - start


class DeviceClock:
    """Events on the current stream. The time between two of them is given in float32, as milliseconds: only
    of events that are near each other is it exact to microseconds, so there is no zero for a whole run."""

    @staticmethod
    def mark() -> torch.Event:
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, torch.Event) and isinstance(end, torch.Event)
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


@dataclass
class RecordedStep:
    """What was recorded of one step.

    zero: when it began.  started_s: the same on the clock of this machine.
    marks: stream, action, start and end.  levels, host_levels: from when on so many bytes were held.
    late: from when to when so many bytes were counted that were gone.
    """

    zero: object
    started_s: float
    marks: list[tuple[str, str, object, object]] = field(default_factory=list)
    levels: list[tuple[object, int]] = field(default_factory=list)
    host_levels: list[tuple[object, int]] = field(default_factory=list)
    late: list[tuple[object, object, int]] = field(default_factory=list)


class Recorder:
    """last: the step that is recorded now, or was last."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.rank = rank
        self.clock = clock
        self._steps: list[RecordedStep] = []
        self.next_step()

    def next_step(self, *, keep: int = 1) -> None:
        """keep: the number of steps that are kept, the new one included. Times count from the oldest."""
        self.last = RecordedStep(started_s=time.perf_counter(), zero=self.clock.mark())
        self._steps = [*self._steps, self.last][-keep:]

    @property
    def started_s(self) -> float:
        """When the oldest step began, on the clock of this machine."""
        return self._steps[0].started_s

    @property
    def step_starts_s(self) -> list[float]:
        return [self._since_zero(step.zero) for step in self._steps]

    def totals_s(self, step: RecordedStep) -> tuple[float, float, float]:
        """Seconds until the step's last action ended; of computing; of waiting."""
        ended_s, taken_s = 0.0, {"compute": 0.0, "recv": 0.0}
        for stream, _, start, end in step.marks:
            ended_s = max(ended_s, self.clock.seconds(step.zero, end))
            if stream in taken_s:
                taken_s[stream] += self.clock.seconds(start, end)
        return ended_s, taken_s["compute"], taken_s["recv"]

    @contextmanager
    def record(self, stream: str, action: str) -> Iterator[None]:
        start = self.clock.mark()
        yield
        self.last.marks.append((stream, action, start, self.clock.mark()))

    def copied(self, stream: str, action: str, start: object, end: object) -> None:
        """A copy ran beside the actions, between two marks."""
        self.last.marks.append((stream, action, start, end))

    def burst(self, size: int) -> None:
        """During the action recorded last, up to `size` bytes were held."""
        self.last.levels.append((self.last.marks[-1][2], size))

    def level(self, size: int) -> None:
        """The rank holds `size` bytes from now on."""
        self.last.levels.append((self.clock.mark(), size))

    def freed(self, size: int, when: object) -> None:
        """The rank notices now that it has not held `size` bytes since the mark `when`."""
        self.last.late.append((when, self.clock.mark(), size))

    def host_level(self, size: int) -> None:
        """The rank has `size` bytes of residuals on the host from now on."""
        self.last.host_levels.append((self.clock.mark(), size))

    def events(self, late_s: float = 0.0) -> tuple[Event, ...]:
        """late_s: how much later than the first rank this one began; times count from that rank's start."""
        at = self._since_zero
        return tuple(
            Event(rank=self.rank, stream=stream, action=action, start_s=at(a) + late_s, end_s=at(b) + late_s)
            for step in self._steps
            for stream, action, a, b in step.marks
        )

    def curves(self, late_s: float = 0.0) -> tuple[MemoryCurve, ...]:
        """Of the device, and of offloaded residuals if there were any. late_s: as in `events`."""
        host = [(self._since_zero(at), size) for step in self._steps for at, size in step.host_levels]
        return tuple(
            MemoryCurve(
                rank=self.rank,
                tier=tier,
                times_s=tuple(max(0.0, at + late_s) for at, _ in levels),
                sizes=tuple(size for _, size in levels),
            )
            for tier, levels in (("device", self._corrected()), ("host", host))
            if levels or tier == "device"
        )

    def _since_zero(self, mark: object) -> float:
        return self.clock.seconds(self._steps[0].zero, mark)

    def _corrected(self) -> list[tuple[float, int]]:
        """Levels of the device without the bytes that were still counted when they were gone."""
        levels = [(self._since_zero(at), size) for step in self._steps for at, size in step.levels]
        for gone, noticed, size in (late for step in self._steps for late in step.late):
            begin, end = self._since_zero(gone), self._since_zero(noticed)
            levels = [(at, level - size if begin <= at < end else level) for at, level in levels]
            place = bisect_left(levels, begin, key=itemgetter(0))
            if place:
                levels.insert(place, (begin, levels[place - 1][1] - size))
        return levels
