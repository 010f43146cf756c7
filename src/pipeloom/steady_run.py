"""SteadyRun: training without draining the pipeline between two steps, on one rank.

    feed(0)   feed(1)   feed(2)  ...  feed(n - 1)   drain()
    lead-in   full      full          full          what is left

Batch b is complete, on all ranks, once the row of batch b + window - 1 has run, or the drain. No rank waits
for all others between two rows: what they tell each other travels in sums that are looked at a row later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ir.errors import BatchError
from .ir.stages import StageGraph
from .lowering.steady import SteadyRow, SteadyRows
from .runtime.batches import SAME_BATCH, batch_digest, read_scalars
from .runtime.channel import PendingSum
from .runtime.rank import Microbatch
from .runtime.recorder import RecordedStep
from .runtime.reduce_and_step import norm_group
from .runtime.transport import SumGroup
from .step_run import Run

SHOWN_ROWS = 3
"""Rows whose events are kept: consecutive steps that a report shows."""


@dataclass(kw_only=True, eq=False)
class _Batch:
    """losses: micro-batch -> loss times its share.  figures: see `StepRecord`."""

    number: int
    flops: float
    losses: dict[int, float] = field(default_factory=dict)
    figures: Tensor | None = None
    grad_norm: float | None = None
    pending: PendingSum | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _RowUnderWay:
    """A row that the device may not have done yet.

    numbers: gives the losses of its micro-batches, and the norm if there is one, once it has.
    losses: micro-batch -> its batch, and its share of the loss.
    batch: the one that the row began; the latest for a drain.  complete: those that its end completes.
    """

    numbers: Callable[[], list[float]]
    losses: dict[int, tuple[_Batch, float]]
    batch: _Batch
    complete: list[_Batch]
    recorded: RecordedStep
    peak_bytes: int


@dataclass(kw_only=True, eq=False)
class SteadyRun(Run):
    """Batches follow each other into a pipeline that does not drain. rows: what each rank runs.

    The host gives a device a row before it reads what the row before has made: so the device never waits for
    the host. On the CPU a row has been done when it has run.
    """

    rows: SteadyRows
    fed: int = 0
    """Batches since the pipeline was last empty."""
    last: int = -1
    """The number of the batch that was fed last."""
    _ring: list[Microbatch | None] = field(default_factory=list)
    _open: deque[_Batch] = field(default_factory=deque)
    _under_way: deque[_RowUnderWay] = field(default_factory=deque)
    _settled_s: float = 0.0
    _told: deque[_Batch] = field(default_factory=deque)
    _shapes: tuple[str, ...] = ()
    _grad_norm: float | None = None
    _digests: deque[tuple[PendingSum, Tensor, Tensor]] = field(default_factory=deque)
    _batch_bytes: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        step = self.rows.step
        self._ring = [None] * (self.rows.stages.replicas * step.window * step.microbatches)
        self._batch_bytes = deque(maxlen=self.rows.step.window)
        self.channel = self.record.channel
        self.control = SumGroup("figures", tuple(range(self.channel.ranks)))

    def groups(self, stages: StageGraph, placement: Sequence[int]) -> list[SumGroup]:
        norms = [norm_group(self.channel.ranks)] if self.rows.clips else []
        return [self.control, *norms, *super().groups(stages, placement)]

    def feed(self, number: int, batch: Any) -> None:
        with self.call(f"step {number + 1}", refuses=(BatchError,)):
            microbatches, size = self.batches.take(batch, step=number, agree=self._agree)
        with self.call(f"step {number + 1}"):
            self.run_row(number, microbatches, size)
        if number < self.rows.updates.flushed:
            self.drain()

    def drain(self) -> None:
        if self.fed:
            with self.call(f"the end of step {self.last + 1}"):
                self._drain()

    def _abandon(self) -> bool:
        """Rows go over from step to step, so that none can be taken back alone."""
        torn = bool(self.fed or self._open) or self.worker.reduce_and_step.updating
        self.fed, self.last = 0, -1
        self._ring = [None] * len(self._ring)
        for left in (self._open, self._under_way, self._told, self._digests, self._batch_bytes):
            left.clear()
        return torn

    def _agree(self, shapes: tuple[str, ...], refusal: BatchError | None, checksum: int) -> None:
        """Tell the others the shapes of a batch, and drain if they have changed, alike on all ranks, or all
        refuse the batch. That ranks have different shapes, or some refuse theirs, is noticed when others have
        begun: it breaks the pipeline off."""
        with self.call("agreeing on a batch"):
            mine = batch_digest(shapes, refusal, checksum)
            total = mine.clone()
            self._digests.append((self.channel.begin_sum(total, self.control), total, mine))
            changed = refusal is not None or shapes != self._shapes
            self._check_digests(leave=0 if changed else 1, refusal=refusal)
            if changed and self.fed:
                self._drain()
        if refusal is not None:
            raise refusal
        self._shapes = shapes

    def _check_digests(self, *, leave: int, refusal: BatchError | None = None) -> None:
        """refusal: why this rank cannot use the latest batch."""
        while len(self._digests) > leave:
            pending, total, mine = self._digests.popleft()
            pending.wait()
            if not torch.equal(total, self.channel.ranks * mine):
                if refusal is not None and not self._digests:
                    raise refusal
                raise BatchError(
                    f"rank {self.channel.rank} has another batch than other ranks, or only some can use it",
                    hint=SAME_BATCH,
                )

    def run_row(self, number: int, microbatches: Sequence[Microbatch], batch_bytes: int) -> None:
        """microbatches: of all replicas.  batch_bytes: what this rank holds of the batch."""
        window, every = self.rows.step.window, self.rows.step.microbatches
        base = number % window * every
        self.worker.reuse(range(base, base + every))
        for replica in range(self.rows.stages.replicas):
            at = replica * window * every + base
            self._ring[at : at + every] = microbatches[replica * every : (replica + 1) * every]
        self._batch_bytes.append(batch_bytes)
        self.record.ledger.set("batch", sum(self._batch_bytes))
        self._report_told(leave=1)
        if self.fed:
            self.record.recorder.next_step(keep=SHOWN_ROWS)
        else:
            self.record.recorder.next_step()
        self._open.append(_Batch(number=number, flops=sum(part.variant.flops for part in microbatches)))
        self._run(self.rows.row(number, self.fed), complete=max(0, len(self._open) - window + 1))
        self.fed, self.last = self.fed + 1, number
        self._settle(leave=0 if self.record.device.type == "cpu" else 1)

    def _drain(self) -> None:
        self.record.recorder.next_step(keep=SHOWN_ROWS + 1)
        self._run(self.rows.drain(self.last, self.fed), complete=len(self._open), drains=True)
        self._settle(leave=0)
        self._check_digests(leave=0)
        self._report_told(leave=0)
        self.fed = 0
        self._batch_bytes.clear()
        self._ring = [None] * len(self._ring)

    def _run(self, row: SteadyRow, *, complete: int, drains: bool = False) -> None:
        """complete: how many batches are, once the device has done it."""
        if not self._under_way:
            self._settled_s = time.perf_counter()
        ring = [part for part in self._ring if part is not None]
        filler = ring[0]
        microbatches = [filler if part is None else part for part in self._ring]
        incoming = row.incoming[self.channel.rank]
        losses = self.worker.run(microbatches, program=row.program, incoming=incoming, drains=drains)
        window, every = self.rows.step.window, self.rows.step.microbatches
        by_slot = {batch.number % window: batch for batch in self._open}
        norm = self.worker.reduce_and_step.grad_norm
        scalars = [*losses.values(), *([] if norm is None else [norm])]
        self._under_way.append(
            _RowUnderWay(
                numbers=read_scalars(scalars, self.record.device),
                losses={i: (by_slot[i // every % window], microbatches[i].weight) for i in losses},
                batch=self._open[-1],
                complete=[self._open.popleft() for _ in range(complete)],
                recorded=self.record.recorder.last,
                peak_bytes=self.record.ledger.peak,
            )
        )

    def _settle(self, *, leave: int) -> None:
        """Read what all rows but the last `leave` have made."""
        rows = [self._under_way.popleft() for _ in range(len(self._under_way) - leave)]
        read = [row.numbers() for row in reversed(rows)]  # the latest first: so the host waits once
        for row, values in zip(rows, reversed(read), strict=True):
            numbers = iter(values)
            for index, (batch, share) in row.losses.items():
                batch.losses[index] = next(numbers) * share
            self._grad_norm = next(numbers, None)
            begin_s, self._settled_s = self._settled_s, time.perf_counter()
            figures = self.record.figures(row.recorded, self._settled_s - begin_s, row.peak_bytes)
            if row.batch.figures is not None:
                figures[:-1] += row.batch.figures[:-1]
            row.batch.figures = figures
            for batch in row.complete:
                self._tell(batch)

    def _tell(self, batch: _Batch) -> None:
        """Begin to sum a complete batch's figures over the ranks."""
        assert batch.figures is not None, "its row has been settled"
        batch.grad_norm = self._grad_norm
        batch.figures = self.record.of_all_ranks(batch.figures, sum(batch.losses.values()))
        batch.pending = self.channel.begin_sum(batch.figures, self.control)
        self._told.append(batch)

    def _report_told(self, *, leave: int) -> None:
        """Make reports of what was told. The latest is left for later: ranks begin their rows one after the
        other, and the first would wait for the last to end the row before."""
        while len(self._told) > leave:
            batch = self._told.popleft()
            assert batch.pending is not None and batch.figures is not None, "it was told"
            batch.pending.wait()
            self.reports.append(self.record.report_of(batch.figures, batch.grad_norm, batch.flops))
