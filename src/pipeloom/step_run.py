"""How a rank trains batch after batch: what steps share, and steps that end before the next one begins."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ir.errors import BatchError, PeerError, PipeloomError
from .ir.plan import Plan
from .ir.stages import StageGraph
from .rank_stages import StageVariants
from .runtime.batches import agree_on_batch, checksum_of, loss_shares, signature_of, split_batch
from .runtime.ledger import out_of_memory_told
from .runtime.rank import Microbatch, Rank
from .runtime.transport import SumGroup
from .step_reports import StepRecord, StepReport
from .tracer.autocast import autocast_around
from .tracer.job import Job
from .tracer.random import microbatch_seed


def refuse_alone(shapes: tuple[str, ...], refusal: BatchError | None, checksum: int) -> None:
    """What a rank does that asks no other."""
    if refusal is not None:
        raise refusal


@dataclass(kw_only=True, eq=False)
class StepBatches:
    """tensors: what a batch of the user's is made of.  everywhere: each rank gives batches.  seed: of random
    ops.  agreed: the ranks of this process have had one batch alike."""

    job: Job
    plan: Plan
    rank: int
    device: torch.device
    seed: int
    training: StageVariants
    tensors: Callable[[Any], dict[str, Tensor]]
    everywhere: bool
    agreed: bool = False

    def take(
        self,
        batch: Any,
        *,
        step: int,
        variants: StageVariants | None = None,
        agree: Callable[[tuple[str, ...], BatchError | None, int], object] = refuse_alone,
    ) -> tuple[list[Microbatch], int]:
        """What the worker gets: micro-batches, each with its share of the loss, and with those inputs of this
        rank's that its stages read; and the bytes of these, or on a CPU of all inputs of its replicas.

        step: steps made before.  variants: stages that evaluate; by default those that train.
        agree: gets the shapes of the batch, why it cannot be used if it cannot, and before the first step a
        checksum, which tells other shuffles apart; ranks have to agree on that before anything else, so that
        none begins alone.
        """
        whole: dict[str, Tensor] = {}
        parts: list[dict[str, Tensor]] = []
        shares: list[float] = []
        refusal: BatchError | None = None
        try:
            whole = self.tensors(batch)
            parts = split_batch(whole, self.plan.microbatches)
            shares = loss_shares(parts, self.job.weight)
        except BatchError as error:
            refusal = error
        checked = self.everywhere and not self.agreed and refusal is None
        agree(signature_of(whole), refusal, checksum_of(whole) if checked else 0)
        self.agreed = True
        keep = variants is None and self.plan.steady is not None
        variants = variants or self.training
        each = self.plan.microbatches // self.plan.replicas
        replicas = self.plan.replicas_on(self.rank)
        microbatches = []
        for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
            variant = variants.variant(part)
            here = index // each in replicas
            read = {name for functions in variant.functions.values() for name in functions.batch}
            microbatches.append(
                Microbatch(
                    variant=variant,
                    inputs={
                        n: _copy_to(self.device, t, keep=keep) for n, t in part.items() if here and n in read
                    },
                    weight=share,
                    seed=microbatch_seed(self.seed, step, index),
                    number=step * each + index % each,
                )
            )
        if self.device.type != "cpu":
            return microbatches, sum(t.nbytes for part in microbatches for t in part.inputs.values())
        size = sum(tensor.nbytes for tensor in whole.values())
        return microbatches, size * self.plan.microbatches_on(self.rank) // self.plan.microbatches


def _copy_to(device: torch.device, tensor: Tensor, *, keep: bool) -> Tensor:
    """Copy from pinned memory: from any other the host would wait for the device at every tensor.

    keep: it is used while the next batch is fed, for which a loader may write over it.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device, copy=keep)
    pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor) if keep else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


@dataclass(kw_only=True, eq=False)
class Run(ABC):
    """What a rank does with its worker, one call after the other; the two kinds differ in what is between two
    steps. Every rank calls the same methods.

    reports: of steps that are complete, until they are taken.
    """

    batches: StepBatches
    worker: Rank
    record: StepRecord
    reports: list[StepReport] = field(default_factory=list)
    _broken: str = ""
    _torn: bool = False
    _overwriting: bool = False
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    @abstractmethod
    def feed(self, number: int, batch: Any) -> None:
        """number: of the batch, from the start of training."""

    @abstractmethod
    def drain(self) -> None:
        """End what is in flight, before anything that is not a step."""

    @abstractmethod
    def _abandon(self) -> bool:
        """Forget what is in flight when a call is broken off; whether parameters may be left half updated."""

    def groups(self, stages: StageGraph, placement: Sequence[int]) -> list[SumGroup]:
        """The groups of ranks that it sums in, to be opened on all ranks. stages: of all replicas."""
        return self.worker.reduce_and_step.groups(stages, placement)

    @contextmanager
    def call(
        self, what: str, *, heals: bool = False, refuses: tuple[type[PipeloomError], ...] = ()
    ) -> Iterator[None]:
        """Do `what`, such as "step 3". If it is broken off, as by Ctrl-C, the next call starts from nothing,
        or refuses if it cannot.

        heals: it makes parameters, buffers and optimizer anew.
        refuses: errors that all ranks raise if one does, while nothing of a step is sent or computed. So they
            break nothing off: the next call starts from where this one did.
        """
        self._recover(heals)
        self.worker.watch.check()
        self._buffers = dict(self.worker.weights.buffers)
        self._overwriting = False
        try:
            # A caller that evaluates in inference mode would leave tensors that cannot be trained with; under
            # autocast what was captured would be cast once more.
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                if autocast_around(self.batches.device):
                    stack.enter_context(torch.autocast(self.batches.device.type, enabled=False))
                stack.enter_context(out_of_memory_told(self.worker.ledger, lambda: what))
                yield
        except BaseException as error:
            if isinstance(error, refuses) and not self._overwriting:
                raise
            first = str(error).partition("\n")[0]
            by = first if isinstance(error, PeerError) else f"{type(error).__name__}: {first}".rstrip(": ")
            self._broken = f"{what} was broken off ({by})"
            self._torn = self._abandon() or self._overwriting or self._torn
            if self.worker.watch.ranks > 1:
                self.worker.watch.fail(error)
            raise
        self.worker.reduce_and_step.updating = False
        self._broken, self._torn = "", False
        self._buffers = {}  # what they were is not needed, and must not stay in memory

    def overwrite(self) -> None:
        """The call that is under way begins to write weights that it has read somewhere."""
        self._overwriting = True

    def _recover(self, heals: bool) -> None:
        """Clear away what a broken call has left, or refuse to go on."""
        if not self._broken:
            return
        if self.worker.watch.ranks > 1:
            raise PipeloomError(
                f"rank {self.worker.rank} cannot go on: {self._broken}, and messages to and from it are lost",
                hint="start all ranks again, and load the newest checkpoint",
            )
        if self._torn and not heals:
            raise PipeloomError(
                f"{self._broken} in the middle of its update: some parameters may be updated and others not",
                hint="load the newest checkpoint, or make the pipeline again",
            )
        self.worker.forget()
        for name, buffer in self._buffers.items():
            self.worker.weights.replace_buffer(name, buffer)
        self.worker.reduce_and_step.updating = False
        if not self._torn:
            self._broken = ""


@dataclass(kw_only=True, eq=False)
class FlushedRun(Run):
    """Each step ends with an update, before the next one begins: nothing is in flight between two."""

    _agreeing_s: float = 0.0

    def feed(self, number: int, batch: Any) -> None:
        start, what = time.perf_counter(), f"step {number + 1}"
        with self.call(what, refuses=(BatchError,)):
            microbatches, size = self.batches.take(batch, step=number, agree=self._agree)
            self.record.ledger.set("batch", size)
        with self.call(what):
            self.record.recorder.next_step()
            losses = self.worker.run(microbatches)
            norm = self.worker.reduce_and_step.grad_norm
            self.reports.append(
                self.record.report(
                    losses, microbatches, start_s=start, agreeing_s=self._agreeing_s, grad_norm=norm
                )
            )

    def _agree(self, shapes: tuple[str, ...], refusal: BatchError | None, checksum: int) -> None:
        start = time.perf_counter()
        agree_on_batch(self.record.channel, shapes, refusal, checksum)
        self._agreeing_s = time.perf_counter() - start

    def drain(self) -> None:
        """Does nothing: each step has."""

    def _abandon(self) -> bool:
        return self.worker.reduce_and_step.updating
