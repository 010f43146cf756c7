"""What a step took: reports, and timelines of steps without a flush."""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .ir.action import Action, B, F, I, W, parse_action
from .ir.errors import ScheduleError
from .ir.steady import SteadyStep
from .ir.timeline import Event, MemoryCurve, Timeline
from .runtime.batches import read_loss
from .runtime.channel import Channel
from .runtime.ledger import Ledger
from .runtime.rank import Microbatch
from .runtime.recorder import RecordedStep, Recorder

STEPS = 3
"""Of a simulation that are shown."""


def full_steps(timeline: Timeline, step: SteadyStep) -> Timeline:
    """The middle steps of a simulation of `step.unrolled`; times count from the first start in them. Memory
    is cut alike; peaks stay those of the whole."""
    steps, first = timeline.steps, step.window  # in it no rank is still filling the pipeline
    kept: list[Event] = []
    ends = []
    for rank in range(timeline.ranks):
        events = sorted((e for e in timeline.events if e.rank == rank), key=lambda e: (e.start_s, e.end_s))
        sizes = [len(step.row(rank, at, steps)) for at in range(first + STEPS)]
        low, high = sum(sizes[:first]), sum(sizes)
        counted, inside = 0, []
        for event in events:
            if low <= counted < high or (counted == high and event.stream != "compute"):
                inside.append(event)
            counted += event.stream == "compute" and _is_in_schedule(event.action)
        kept += [_renumbered(e, lambda n: n - step.microbatches, 1) for e in inside]
        ends.append(max((e.end_s for e in inside if e.stream == "compute"), default=0.0))
    zero, end = min((e.start_s for e in kept), default=0.0), max(ends, default=0.0)
    return replace(
        timeline,
        events=tuple(_moved(e, zero, end) for e in kept if e.start_s <= end),
        memory=tuple(_cut(curve, zero, end) for curve in timeline.memory),
        steps=STEPS,
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
    residue = parse_action(first).microbatch // every
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
    return step is not None and step.kind in (F, B, I, W)


def _parsed(action: str) -> Action | None:
    try:
        return parse_action(action, in_program=True)
    except ScheduleError:
        return None  # what the runtime does besides, such as CLIP


def _renumbered(event: Event, number: Callable[[int], int], update_shift: int) -> Event:
    step = _parsed(event.action)
    if step is None or (step.is_stage_wide and step.microbatch < 0):
        return event
    renumbered = step.microbatch - update_shift if step.is_stage_wide else number(step.microbatch)
    return replace(event, action=str(replace(step, microbatch=max(0, renumbered))))


def _moved(event: Event, zero: float, end: float) -> Event:
    return replace(event, start_s=event.start_s - zero, end_s=min(event.end_s, end) - zero)


def _cut(curve: MemoryCurve, zero: float, end: float) -> MemoryCurve:
    pairs = list(zip(curve.times_s, curve.sizes, strict=True))
    before = [size for at, size in pairs if at <= zero][-1:]
    inside = [(at, size) for at, size in pairs if zero < at <= end]
    levels = [*((zero, size) for size in before), *inside]
    times_s, sizes = tuple(at - zero for at, _ in levels), tuple(size for _, size in levels)
    return replace(curve, times_s=times_s, sizes=sizes)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step was like, the same on every rank.

    step_s: seconds from its first action to the end of its last, on the slowest rank.
    wall_s: per rank, seconds of the whole call but its last exchange.  busy_s: of computing.  waited_s: for
    messages and other ranks.  peak_bytes: largest memory so far.  grad_norm: before clipping, None without.
    mfu: operations of matrix products that the step needs, as a share of what its devices could do in the
    same time; None where their peak is not known.  tf32: whether GPUs may have multiplied float32 in TF32.
    """

    loss: float
    step_s: float
    wall_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    grad_norm: float | None = None
    mfu: float | None = None
    tf32: bool = field(default_factory=lambda: torch.get_float32_matmul_precision() != "highest")

    @property
    def bubble(self) -> float:
        """Share of rank-time in which nothing was computed."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)

    @property
    def overhead(self) -> float:
        """Largest share of a rank's time that is neither computing nor waiting: pipeloom's own work."""
        parts = zip(self.wall_s, self.busy_s, self.waited_s, strict=True)
        return max((wall - busy - waited) / wall for wall, busy, waited in parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """What one rank has recorded of its steps. Every rank calls the same methods.

    peak_flops_per_s: of all ranks' devices together, where it is known.
    """

    channel: Channel
    recorder: Recorder
    ledger: Ledger
    device: torch.device
    peak_flops_per_s: float | None = None

    def report(
        self,
        losses: Mapping[int, Tensor],
        microbatches: Sequence[Microbatch],
        *,
        start_s: float,
        agreeing_s: float,
        grad_norm: Tensor | None,
    ) -> StepReport:
        """The figures of the last step, of all ranks. The one place of a step where the host waits for the
        device.

        start_s: when the step began, by `time.perf_counter`.  agreeing_s: for how long the ranks agreed on
        the batch before it.
        """
        norms = [] if grad_norm is None else [grad_norm]
        loss, *norm = read_loss(losses, microbatches, self.device, *norms)
        wall_s, step = time.perf_counter() - start_s, self.recorder.last
        figures = self.of_all_ranks(self.figures(step, wall_s, self.ledger.peak, agreeing_s), loss)
        self.channel.all_reduce(figures)
        flops = sum(part.variant.flops for part in microbatches)
        return self.report_of(figures, norm[0] if norm else None, flops)

    def figures(self, step: RecordedStep, wall_s: float, peak_bytes: int, agreeing_s: float = 0.0) -> Tensor:
        """Of a step of this rank that the device has done: seconds until its last action ended, of the whole
        call, computing and waiting; and its peak bytes."""
        ended_s, busy_s, waited_s = self.recorder.totals_s(step)
        return torch.tensor([ended_s, wall_s, busy_s, waited_s + agreeing_s, peak_bytes], dtype=torch.float64)

    def of_all_ranks(self, figures: Tensor, loss: float) -> Tensor:
        """What the ranks sum so that each has the figures of all, and the loss; see `report_of`."""
        table = torch.zeros(self.channel.ranks, len(figures), dtype=torch.float64)
        table[self.channel.rank] = figures
        return torch.cat([table.flatten(), torch.tensor([loss], dtype=torch.float64)])

    def report_of(self, summed: Tensor, grad_norm: float | None, flops: float) -> StepReport:
        """summed: the figures of all ranks, one rank after the other, and the loss.  flops: of the step."""
        ends, walls, busy_s, waited_s, peaks = summed[:-1].reshape(self.channel.ranks, -1).T.tolist()
        peak = self.peak_flops_per_s
        return StepReport(
            loss=float(summed[-1]),
            step_s=max(ends),
            wall_s=tuple(walls),
            busy_s=tuple(busy_s),
            waited_s=tuple(waited_s),
            peak_bytes=tuple(map(int, peaks)),
            grad_norm=grad_norm,
            mfu=None if peak is None else flops / (peak * max(ends)),
        )

    def timeline(self, pairs: Iterable[tuple[Action, Action]], steady: SteadyStep | None) -> Timeline:
        """The last step of all ranks; the last few of a pipeline that does not drain between them.

        pairs: actions that run as one.  steady: the step that such a pipeline repeats.

        Times count from the start of the first rank where all share a machine and so a clock; otherwise
        from each rank's own start.
        """
        starts = self.channel.all_gather_object((platform.node(), self.recorder.started_s))
        one_machine = len({node for node, _ in starts}) == 1
        late_s = self.recorder.started_s - min(at for _, at in starts) if one_machine else 0.0
        starts_s = [late_s + start for start in self.recorder.step_starts_s]
        events = list(self.recorder.events(late_s))
        if steady is not None:
            events = numbered_on(events, steady, starts_s)
        # Seconds from one step to the next; the last start is that of the drain.
        row_s = (starts_s[-1] - starts_s[0]) / max(1, len(starts_s) - 1)
        mine = (events, self.recorder.curves(late_s), (self.ledger.at_peak, self.ledger.residual_peak), row_s)
        parts = self.channel.all_gather_object(mine)
        return Timeline(
            source="measured",
            ranks=self.channel.ranks,
            events=tuple(e for events, _, _, _ in parts for e in events),
            memory=tuple(curve for _, curves, _, _ in parts for curve in curves),
            peaks=tuple(peak for _, _, (peak, _), _ in parts),
            residual_peaks=tuple(residuals for _, _, (_, residuals), _ in parts),
            pairs=tuple((str(first), str(second)) for first, second in pairs),
            steps=1 if steady is None else max(1, len(starts_s) - 1),
            steady_s=None if steady is None else max(row_s for _, _, _, row_s in parts),
        )
