"""A few consecutive steps of a pipeline that does not drain, out of a longer timeline: what reports show.

Micro-batches are numbered as in the plan's rows for the first of these steps, and on from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..ir.action import Action, Instruction, StageAction, Transfer, parse_instruction
from ..ir.errors import ScheduleError
from ..ir.steady import SteadyStep
from ..ir.timeline import Event, MemoryCurve, Timeline

FIRST_STEP = 2
"""Of a simulation the first step that is shown: no rank is still filling the pipeline."""


def full_steps(timeline: Timeline, step: SteadyStep, *, count: int = 3) -> Timeline:
    """The middle steps of a simulation of `step.unrolled`; times count from the first start in them.

    count: of steps. Memory is cut alike; peaks stay those of the whole.
    """
    steps = timeline.steps
    shift = (FIRST_STEP - step.window + 1) * step.microbatches
    kept: list[Event] = []
    ends = []
    for rank in range(timeline.ranks):
        own = sorted((e for e in timeline.events if e.rank == rank), key=lambda e: (e.start_s, e.end_s))
        sizes = [len(step.row(rank, at, steps)) for at in range(FIRST_STEP + count)]
        low, high = sum(sizes[:FIRST_STEP]), sum(sizes)
        counted, inside = 0, []
        for event in own:
            if low <= counted < high or (counted == high and event.stream != "compute"):
                inside.append(event)
            counted += event.stream == "compute" and _is_in_schedule(event.action)
        kept += [_renumbered(e, lambda n: n - shift, FIRST_STEP - step.window + 1) for e in inside]
        ends.append(max((e.end_s for e in inside if e.stream == "compute"), default=0.0))
    zero, end = min((e.start_s for e in kept), default=0.0), max(ends, default=0.0)
    return replace(
        timeline,
        events=tuple(_moved(e, zero, end) for e in kept if e.start_s <= end),
        memory=tuple(_cut(curve, zero, end) for curve in timeline.memory),
        steps=count,
    )


def numbered_on(events: Sequence[Event], step: SteadyStep, row_starts_s: Sequence[float]) -> list[Event]:
    """A rank's recorded events with numbers that go on from step to step, instead of modulo the window.

    row_starts_s: when each of the steps began that were recorded, the drain included. The number of the first
    of them, modulo the window, is that of its first forward.
    """
    first = next((e.action for e in events if "F" in e.action and _is_in_schedule(e.action)), None)
    if first is None:
        return list(events)
    window, every = step.window, step.microbatches
    begun = parse_instruction(first)
    assert isinstance(begun, Action)
    residue = begun.microbatch // every
    renumbered = []
    for event in events:
        row = max(0, bisect_left(row_starts_s, event.start_s + 1e-9) - 1)

        def number(microbatch: int, row: int = row) -> int:
            age = (residue + row - microbatch // every) % window
            return (row - age + window - 1) * every + microbatch % every

        renumbered.append(_renumbered(event, number, 0))
    return renumbered


def _is_in_schedule(action: str) -> bool:
    step = _parsed(action)
    return isinstance(step, Action) and step.kind in ("F", "B", "I", "W")


def _parsed(action: str) -> Instruction | None:
    try:
        return parse_instruction(action)
    except ScheduleError:
        return None  # what the runtime does besides, such as CLIP


def _renumbered(event: Event, number: Callable[[int], int], update_shift: int) -> Event:
    step = _parsed(event.action)
    if isinstance(step, Action | Transfer):
        return replace(event, action=str(replace(step, microbatch=max(0, number(step.microbatch)))))
    if isinstance(step, StageAction) and step.update >= 0:
        return replace(event, action=str(replace(step, update=max(0, step.update - update_shift))))
    return event


def _moved(event: Event, zero: float, end: float) -> Event:
    return replace(event, start_s=event.start_s - zero, end_s=min(event.end_s, end) - zero)


def _cut(curve: MemoryCurve, zero: float, end: float) -> MemoryCurve:
    pairs = list(zip(curve.times_s, curve.sizes, strict=True))
    before = [size for at, size in pairs if at <= zero][-1:]
    inside = [(at, size) for at, size in pairs if zero < at <= end]
    levels = [*((zero, size) for size in before), *inside]
    return replace(
        curve,
        times_s=tuple(at - zero for at, _ in levels),
        sizes=tuple(size for _, size in levels),
    )
