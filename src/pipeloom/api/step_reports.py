"""What a step was like on all ranks: its figures, and its timeline."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir.action import Action
from ..ir.steady import SteadyStep
from ..ir.timeline import Timeline
from ..runtime.ledger import Ledger
from ..runtime.loss_scaling import Round, read_loss
from ..runtime.posted_channel import PostedChannel
from ..runtime.recorder import Recorder
from .steady_timeline import numbered_on


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step was like, the same on every rank.

    step_s: seconds from its first action to the end of its last, on the slowest rank.
    wall_s: per rank, seconds of the whole call but its last exchange.  busy_s: of computing.  waited_s: for
    messages and other ranks.  peak_bytes: largest memory so far.  grad_norm: before clipping, None without.
    """

    loss: float
    step_s: float
    wall_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    grad_norm: float | None = None

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
    """What one rank has recorded of its steps. Every rank calls the same methods."""

    channel: PostedChannel
    recorder: Recorder
    ledger: Ledger
    device: torch.device

    def report(
        self, rounds: Sequence[Round], *, start_s: float, agreeing_s: float, grad_norm: Tensor | None
    ) -> StepReport:
        """The figures of the last step, of all ranks. The one place of a step where the host waits for the
        device.

        start_s: when the step began, by `time.perf_counter`.  agreeing_s: for how long the ranks agreed on
        the batch before it.
        """
        loss, *norm = read_loss(rounds, self.device, *([] if grad_norm is None else [grad_norm]))
        figures = rank_figures(self.recorder, self.ledger, start_s, agreeing_s)
        table = torch.zeros(self.channel.ranks, len(figures), dtype=torch.float64)
        table[self.channel.rank] = figures
        both = torch.cat([table.flatten(), torch.tensor([loss], dtype=torch.float64)])
        self.channel.all_reduce(both)
        return report_of(both, self.channel.ranks, norm[0] if norm else None)

    def timeline(self, pairs: Iterable[tuple[Action, Action]], steady: SteadyStep | None = None) -> Timeline:
        """The last step of all ranks; the last few of a pipeline that does not drain between them.

        pairs: actions that run as one.  steady: the step that such a pipeline repeats.

        Times count from the start of the first rank where all share a machine and so a clock; otherwise
        from each rank's own start.
        """
        starts = self.channel.all_gather_object((platform.node(), self.recorder.started_s))
        one_machine = len({node for node, _ in starts}) == 1
        late_s = self.recorder.started_s - min(at for _, at in starts) if one_machine else 0.0
        curves = (self.recorder.curve(late_s), *self.recorder.host_curves(late_s))
        starts_s = [late_s + start for start in self.recorder.step_starts_s]
        events = list(self.recorder.events(late_s))
        if steady is not None:
            events = numbered_on(events, steady, starts_s)
        mine = (events, curves, (self.ledger.at_peak, self.ledger.residual_peak), _row_s(starts_s))
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


def _row_s(starts_s: Sequence[float]) -> float:
    """Seconds from one step to the next; the last start is that of the drain."""
    return (starts_s[-1] - starts_s[0]) / max(1, len(starts_s) - 1)


def rank_figures(recorder: Recorder, ledger: Ledger, start_s: float, agreeing_s: float = 0.0) -> Tensor:
    """What one rank tells of its last step: seconds until its last action ended, of the whole call, computing
    and waiting, and its peak bytes."""
    events = recorder.events_of_last_step()
    busy = sum(e.duration_s for e in events if e.stream == "compute")
    waited = sum(e.duration_s for e in events if e.stream == "recv") + agreeing_s
    ended = max((e.end_s for e in events), default=0.0)
    return torch.tensor(
        [ended, time.perf_counter() - start_s, busy, waited, ledger.peak], dtype=torch.float64
    )


def report_of(summed: Tensor, ranks: int, grad_norm: float | None) -> StepReport:
    """summed: the figures of all ranks, one rank after the other, and the loss."""
    ends, walls, busy_s, waited_s, peaks = summed[:-1].reshape(ranks, -1).T.tolist()
    return StepReport(
        loss=float(summed[-1]),
        step_s=max(ends),
        wall_s=tuple(walls),
        busy_s=tuple(busy_s),
        waited_s=tuple(waited_s),
        peak_bytes=tuple(map(int, peaks)),
        grad_norm=grad_norm,
    )
