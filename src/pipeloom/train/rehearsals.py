"""Prediction against measurement, at the pace that the machine has then.

A machine that others use too, or that grows warm, does not keep its pace: a prediction made before training
and a step made a minute later differ by that alone. So a run rehearses again and again between its steps, and
holds each rehearsal against the few steps around it. Measured steps never enter a prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..ir.timeline import Timeline
from ..pipeline import Pipeline

T = TypeVar("T")

BEFORE, AFTER = 2, 3
"""Steps that a rehearsal is held against. An odd number of them has a middle one."""

STEADY_AFTER = 5
"""The same where the pipeline does not drain: the first ones fill it."""

WARM_UP_STEPS = 3
"""Steps before those."""

STEPS_PER_REHEARSAL = 8
"""A rehearsal takes nearly as long as a step: short runs make fewer."""


@dataclass(frozen=True, kw_only=True)
class RehearsalWindow:
    """step: steps done when it was made.  steps: how many steps the measured one is the middle of."""

    step: int
    steps: int
    predicted: Timeline
    measured: Timeline

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.measured.step_s - 1.0


@dataclass(frozen=True, kw_only=True)
class RehearsalComparison:
    windows: tuple[RehearsalWindow, ...]

    @property
    def middle(self) -> RehearsalWindow:
        """The window of middle error; its error is the run's."""
        return _middle(self.windows, [window.error for window in self.windows])

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Errors between which the middle half of the windows lies; None for fewer than four windows."""
        if len(self.windows) < 4:
            return None
        lower, _, upper = statistics.quantiles([w.error for w in self.windows], n=4, method="inclusive")
        return lower, upper

    def __str__(self) -> str:
        count, middle = len(self.windows), self.middle
        if count == 1:
            told = f"one rehearsal after {middle.step} steps,"
        else:
            told = f"{count} rehearsals after {self.windows[0].step} to {self.windows[-1].step} steps, each"
        text = f"{told} against the steps around it: predicted step time off by {middle.error:+.1%}"
        if self.quartiles is not None:
            lower, upper = self.quartiles
            text += f" in the middle one, by {lower:+.1%} to {upper:+.1%} in the middle half"
        return text


class StepRehearsals:
    """Rehearses at the planned steps of a run, and keeps the steps around them. Every rank does the same.

    If the pipeline does not drain after each step, one measurement after each rehearsal has the last few of
    the steps behind it.
    """

    def __init__(self, pipeline: Pipeline, *, first: int, end: int, rehearsals: int) -> None:
        self._pipeline = pipeline
        self._planned = rehearsal_steps(first, end, rehearsals)
        self._after = AFTER if pipeline.drains_each_step else STEADY_AFTER
        # Not with step 0: optimizers make their state in it, which is then not held at its peak.
        self._compared = {s for at in self._planned for s in range(max(at - BEFORE, 1), at + AFTER)}
        if not pipeline.drains_each_step:
            self._compared = {at + STEADY_AFTER - 1 for at in self._planned}
        self._last = end - 1
        self._kept: dict[int, Timeline] = {}
        self._rehearsed: dict[int, Timeline] = {}
        self._windows: list[RehearsalWindow] = []
        self._final: Timeline | None = None

    def before(self, step: int) -> float | None:
        """Call it before a step, with the number of steps done; seconds predicted, if it rehearsed."""
        if step not in self._planned:
            return None
        self._rehearsed[step] = self._pipeline.rehearse()
        return self._rehearsed[step].step_s

    def after(self, step: int) -> None:
        """Call it after that step, with the same number."""
        if step in self._compared or step == self._last:
            self._final = self._kept[step] = self._pipeline.measured()
        for at in [at for at in self._rehearsed if step in (at + self._after - 1, self._last)]:
            around = [self._kept[s] for s in range(at - BEFORE, at + self._after) if s in self._kept]
            middle = _middle(around, [timeline.step_s for timeline in around])
            predicted = self._rehearsed.pop(at)
            window = RehearsalWindow(step=at, steps=len(around), predicted=predicted, measured=middle)
            self._windows.append(window)
            self._kept = {s: timeline for s, timeline in self._kept.items() if s >= step - BEFORE}

    def is_stop(self, done: int) -> bool:
        return done in self._planned or done - 1 in self._compared

    @property
    def comparison(self) -> RehearsalComparison | None:
        return RehearsalComparison(windows=tuple(self._windows)) if self._windows else None

    @property
    def measured(self) -> Timeline | None:
        """The step that stands for the run: of the middle window, else the last one; None without steps."""
        return self._final if self.comparison is None else self.comparison.middle.measured


def rehearsal_steps(first: int, end: int, most: int) -> tuple[int, ...]:
    """Before which steps a run rehearses: an odd number of them, evenly spread, the first ones apart.

    >>> rehearsal_steps(0, 60, 21)
    (5, 14, 22, 31, 40, 48, 57)
    >>> rehearsal_steps(100, 103, 21), rehearsal_steps(0, 400, 0)
    ((101,), ())
    """
    steps = end - first
    if steps < 1 or most < 1:
        return ()
    begin = first + min(WARM_UP_STEPS + BEFORE, steps // 2)
    last = max(begin, end - AFTER)
    count = min(most, steps // STEPS_PER_REHEARSAL)
    count = max(1, count - (count % 2 == 0))
    if count == 1:
        return (begin,)
    return tuple(begin + round(index * (last - begin) / (count - 1)) for index in range(count))


def _middle(items: Sequence[T], sizes: Sequence[float]) -> T:
    return items[sorted(range(len(items)), key=sizes.__getitem__)[len(items) // 2]]
