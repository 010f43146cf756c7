"""SteadyRun: training without draining the pipeline between two steps, on one rank.

    feed(0)   feed(1)   feed(2)  ...  feed(n - 1)   drain()
    lead-in   full      full          full          what is left

Batch b is complete, on all ranks, once the row of batch b + window - 1 has run, or the drain. No rank waits
for all others between two rows: what they tell each other travels in sums that are looked at a row later.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ir.errors import BatchError, ConfigError
from .ir.plan import Plan
from .ir.stages import StageGraph
from .lowering.steady import SteadyRow, SteadyRows
from .options import Options
from .runtime.ledger import Ledger
from .runtime.loss_scaling import read_scalars
from .runtime.posted import PendingSum
from .runtime.posted_channel import PostedChannel
from .runtime.recorder import Recorder
from .runtime.reduce_and_step import norm_group
from .runtime.step_state import Microbatch
from .runtime.transports.transport import SumGroup
from .runtime.worker import Worker
from .step_reports import StepReport, rank_figures, report_of

SHOWN_ROWS = 3
"""Rows whose events are kept: consecutive steps that a report shows."""


@dataclass(kw_only=True, eq=False)
class _Batch:
    """A batch that was fed.  losses: micro-batch -> loss times its share.  figures: see `rank_figures`."""

    number: int
    losses: dict[int, float] = field(default_factory=dict)
    figures: Tensor
    grad_norm: float | None = None
    pending: PendingSum | None = None


@dataclass(kw_only=True, eq=False)
class SteadyRun:
    """Feeds batches to one rank's worker.

    rows: what each rank runs.  microbatches: of all replicas, per batch.
    """

    rows: SteadyRows
    replicas: int
    worker: Worker
    channel: PostedChannel
    recorder: Recorder
    ledger: Ledger
    device: torch.device
    fed: int = 0
    """Batches since the pipeline was last empty."""
    last: int = -1
    """The number of the batch that was fed last."""
    reports: list[StepReport] = field(default_factory=list)
    _ring: list[Microbatch | None] = field(default_factory=list)
    _open: deque[_Batch] = field(default_factory=deque)
    _told: deque[_Batch] = field(default_factory=deque)
    _shapes: tuple[str, ...] = ()
    _grad_norm: float | None = None
    _digests: deque[tuple[PendingSum, Tensor, float]] = field(default_factory=deque)
    _batch_bytes: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._ring = [None] * (self.replicas * self.rows.step.window * self.rows.step.microbatches)
        self.control = SumGroup("figures", tuple(range(self.channel.ranks)))
        groups = [self.control]
        if self.rows.clips:
            groups.append(norm_group(self.channel.ranks))
        updates = self.worker.reduce_and_step
        groups += updates.groups(self.rows.stages, self.placement, self.worker.weights)
        self.channel.open_groups(groups)

    @property
    def placement(self) -> tuple[int, ...]:
        return self.rows.step.placement

    def agree(self, shapes: tuple[str, ...], refusal: BatchError | None) -> bool:
        """Tell the others the shapes of a batch. True if the pipeline has to drain before it can be fed:
        shapes have changed, alike on all ranks, or all refuse the batch.

        Raises: BatchError if ranks have different shapes, or some refuse theirs.
        """
        mine = float(zlib.crc32(repr(shapes).encode()) % 2**21)
        total = torch.tensor([mine, mine * mine, refusal is not None], dtype=torch.float64)
        self._digests.append((self.channel.begin_sum(total, self.control), total, mine))
        changed = refusal is not None or shapes != self._shapes
        self._check_digests(leave=0 if changed else 1)
        if refusal is None:
            self._shapes = shapes
        return changed

    def _check_digests(self, *, leave: int) -> None:
        while len(self._digests) > leave:
            pending, total, mine = self._digests.popleft()
            pending.wait()
            *hashes, refusals = total.tolist()
            ranks = self.channel.ranks
            if hashes != [ranks * mine, ranks * mine * mine] or refusals not in (0, ranks):
                raise BatchError(
                    f"rank {self.channel.rank} has another batch than other ranks, or only some can use it",
                    hint="give all ranks the same batch",
                )

    def feed(self, number: int, microbatches: Sequence[Microbatch], batch_bytes: int) -> None:
        """Run a batch's row. number: of the batch, from the start of training."""
        window, every = self.rows.step.window, self.rows.step.microbatches
        base = number % window * every
        self.worker.reuse(range(base, base + every))
        for replica in range(self.replicas):
            at = replica * window * every + base
            self._ring[at : at + every] = microbatches[replica * every : (replica + 1) * every]
        self._batch_bytes.append(batch_bytes)
        while len(self._batch_bytes) > window:
            self._batch_bytes.popleft()
        self.ledger.set("batch", sum(self._batch_bytes))
        self._report_told(leave=1)
        if self.fed:
            self.recorder.next_step(keep=SHOWN_ROWS)
        else:
            self.recorder.begin()
        start_s = time.perf_counter()
        self._open.append(_Batch(number=number, figures=torch.zeros(0)))
        self._run(self.rows.row(number, self.fed), drains=False)
        self._open[-1].figures = rank_figures(self.recorder, self.ledger, start_s)
        self.fed, self.last = self.fed + 1, number
        if len(self._open) >= window:
            self._tell(self._open.popleft())

    def drain(self) -> None:
        """Run what is left, so that nothing is in flight. Does nothing where that is so already."""
        if not self.fed:
            return
        self.recorder.next_step(keep=SHOWN_ROWS + 1)
        start_s = time.perf_counter()
        self._run(self.rows.drain(self.last, self.fed), drains=True)
        latest = self._open[-1]
        latest.figures = latest.figures + rank_figures(self.recorder, self.ledger, start_s)
        latest.figures[-1] = self.ledger.peak
        while self._open:
            self._tell(self._open.popleft())
        self._check_digests(leave=0)
        self._report_told(leave=0)
        self.fed = 0
        self._batch_bytes.clear()

    def _run(self, row: SteadyRow, *, drains: bool) -> None:
        ring = [part for part in self._ring if part is not None]
        filler = ring[0]
        microbatches = [filler if part is None else part for part in self._ring]
        losses = self.worker.run(
            microbatches,
            program=row.program,
            incoming=row.incoming[self.channel.rank],
            drains=drains,
        )
        window, every = self.rows.step.window, self.rows.step.microbatches
        by_slot = {batch.number % window: batch for batch in self._open}
        norm = self.worker.reduce_and_step.grad_norm
        numbers = read_scalars([*losses.values(), *([] if norm is None else [norm])], self.device)
        if norm is not None:
            self._grad_norm = numbers.pop()
        for index, loss in zip(losses, numbers, strict=True):
            batch = by_slot[index // every % window]
            batch.losses[index] = loss * microbatches[index].weight

    def _tell(self, batch: _Batch) -> None:
        """Begin to sum a complete batch's figures over the ranks."""
        batch.grad_norm = self._grad_norm
        table = torch.zeros(self.channel.ranks, len(batch.figures), dtype=torch.float64)
        table[self.channel.rank] = batch.figures
        loss = torch.tensor([sum(batch.losses.values())], dtype=torch.float64)
        batch.figures = torch.cat([table.flatten(), loss])
        batch.pending = self.channel.begin_sum(batch.figures, self.control)
        self._told.append(batch)

    def _report_told(self, *, leave: int) -> None:
        """Make reports of what was told. The latest is left for later: ranks begin their rows one after the
        other, and the first would wait for the last to end the row before."""
        while len(self._told) > leave:
            batch = self._told.popleft()
            assert batch.pending is not None
            batch.pending.wait()
            self.reports.append(report_of(batch.figures, self.channel.ranks, batch.grad_norm))

    def take_reports(self) -> list[StepReport]:
        """Of the batches that are complete and were not taken yet, in order."""
        taken, self.reports = self.reports, []
        return taken

    def forget(self) -> None:
        """After a call that was broken off: nothing of what was in flight is waited for."""
        self.fed, self.last = 0, -1
        for left in (self._open, self._told, self._digests, self._batch_bytes):
            left.clear()


def open_steady_run(
    plan: Plan,
    stages: StageGraph,
    options: Options,
    *,
    worker: Worker,
    channel: PostedChannel,
    recorder: Recorder,
    ledger: Ledger,
    device: torch.device,
) -> SteadyRun | None:
    """For a plan whose weights are updated without a flush; None for another one. Every rank calls it, as the
    groups are opened here that sum gradients.

    stages: of all replicas.
    Raises: ConfigError if gradients are to be accumulated over several rounds; ScheduleError if the plan's
        rows cannot be cut into steps.
    """
    if plan.steady is None or plan.updates is None:
        channel.open_groups(worker.reduce_and_step.groups(stages, plan.placement, worker.weights))
        return None
    if options.accumulate > 1:
        raise ConfigError(
            f"gradients of {options.accumulate} rounds are to be accumulated, but with weights "
            f"{plan.weights} every round is followed by an update",
            hint="use more micro-batches per step instead, or --weights flush",
        )
    rows = SteadyRows(
        step=plan.steady,
        stages=stages,
        updates=plan.updates,
        policy=plan.memory,
        clips=options.clip_norm is not None,
    )
    return SteadyRun(
        rows=rows,
        replicas=plan.replicas,
        worker=worker,
        channel=channel,
        recorder=recorder,
        ledger=ledger,
        device=device,
    )
