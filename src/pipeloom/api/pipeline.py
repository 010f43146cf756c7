"""Pipeline: a plan, running. One object per rank, one call per step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..ir.cluster import Cluster
from ..ir.errors import ConfigError
from ..ir.plan import Plan
from ..ir.timeline import Timeline
from ..runtime.batches import agree_on_shapes, signature_of
from ..runtime.loss_scaling import read_loss
from ..runtime.step_state import Microbatch
from ..runtime.transports.local_channel import LocalChannel
from ..tracer.attributes import attributes_kept
from ..tracer.captured import Captured
from ..tracer.job import Job
from .calls import Calls
from .first_comparison import require_equal_once
from .forecast import Rehearsals
from .options import Options
from .pipeline_parts import PipelineParts
from .runnable import require_training
from .steady_timeline import full_steps
from .step_reports import StepReport


class Pipeline(PipelineParts):
    """Trains a job's model on the ranks of a plan. Every rank makes one and calls it with the same batch.

    Under torchrun or `pipeloom train` the ranks are processes; `group` may name an existing process group
    or a DeviceMesh with a dimension "pp". A plan for one rank needs neither. When a process on CPUs ends,
    groups are destroyed and dropped from its script's globals, as gloo's threads must end first: what else
    holds one is to be dropped by the script.

    job: the model, its batches and its optimizer.  plan: a plan or the path of its file, the same on every
        rank.  options: how it runs; see `Options`.
    channel: of a rank that is a thread of this process (`runtime.local_channels`), instead of a group.
    captured: the job's model, captured for the plan's micro-batches; without it each rank captures it.

    A step that is broken off, as by Ctrl-C, leaves nothing to the next one; several ranks refuse to go on.

    Raises: PlanError if the plan was made for another model or number of ranks; ScheduleError if the
        runtime lacks what its schedule needs; InfeasibleError if a step needs more memory than its caps
        allow, MemoryCapError if the weights alone do or the device lacks memory; CaptureError if the model
        cannot be captured; VerifyError if the first comparison with plain PyTorch fails; ConfigError if the
        process is not one of several ranks, or the plan's file cannot be read; PeerError if another rank
        fails.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> plan = pipeloom.plan(job, stages=1, microbatches=2, microbatch_size=4, cluster="a100-40")
    >>> with pipeloom.Pipeline(job, plan) as pipeline:  # of several ranks each does the same
    ...     losses = [pipeline.step(job.batch(seed, 8)) for seed in (1, 1, 1)]
    >>> losses[0] > losses[1] > losses[2]
    True
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | Path | str,
        *,
        options: Options | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        channel: LocalChannel | None = None,
        captured: Captured | None = None,
    ) -> None:
        super().__init__(job, plan, options=options, group=group, channel=channel, captured=captured)
        self.watch.__enter__()
        with ExitStack() as ended:  # where it cannot be built: the others are told, and no thread stays
            ended.push(self)
            self.watch.check()
            self._build()
            ended.pop_all()
        self.calls = Calls(self.watch, self.worker, self.steady)

    def _build(self) -> None:
        rank_stages = self._cut_model()
        if self.rank == 0:  # the others make their weights, and wait where all foresee what a step holds
            require_equal_once(Pipeline, self.job, self.plan, self.captured, self.options)
        self._make_ready(rank_stages)
        self.steps_done = 0
        self.report: StepReport | None = None
        self.rehearsals: Rehearsals | None = None

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train on one batch: split it into micro-batches, run the schedule, update.

        batch: tensors whose first dimension is the batch; the same on every rank. Its rows are spread
            evenly over the micro-batches; another sequence length than before is captured anew.
        Returns: the loss, averaged over the batch, on every rank.
        Raises: BatchError on all ranks if the batch cannot be split or the ranks have different ones; the
            next call may bring another batch. ScheduleError for a plan that only evaluates; MemoryCapError
            if a rank would pass its cap or its device has no more memory; OffloadError and CommunicationError
            if a copy or a message fails; PeerError if another rank failed; PipeloomError if an earlier call
            was broken off and this one cannot go on from there, which holds for all methods.
        """
        start = time.perf_counter()
        require_training(self.plan)
        if self.steady is not None:
            self._feed(batch)
            self._drain()
            return self._new_reports()[-1].loss
        what = f"step {self.steps_done + 1}"
        with self.calls.call(what, refuses_batches=True):
            rounds = self._microbatches(batch, training=True)
        with self.calls.call(what):
            self.recorder.begin()
            done = [
                (self.worker.run(microbatches, update=microbatches is rounds[-1]), microbatches)
                for microbatches in rounds
            ]
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps_done += 1
            self.report = self.record.report(
                done,
                start_s=start,
                agreeing_s=self._agreeing_s,
                grad_norm=self.worker.reduce_and_step.grad_norm,
            )
        return self.report.loss

    @property
    def drains_each_step(self) -> bool:
        """Whether nothing is in flight between two steps: the plan's weights are updated with a flush."""
        return self.steady is None

    def steps(self, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[StepReport]:
        """Train on batches one after the other, without draining the pipeline between them if the plan's
        weights are updated without a flush; with the same numbers as `step`, which drains each time.

        batches: each as `step` takes it.
        Yields: one report per batch, in order; without a flush up to three batches late. What else is called
            between two of them, such as `evaluate`, drains first.
        Raises: BatchError and all else that `step` raises.
        """
        require_training(self.plan)
        for batch in batches:
            if self.steady is None:
                self.step(batch)
                assert self.report is not None
                yield self.report
            else:
                self._feed(batch)
                yield from self._new_reports()
        self._drain()
        yield from self._new_reports()

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of one batch in evaluation mode, on every rank. Nothing is updated.

        batch: as `step` takes it; `Options.accumulate` does not count.
        Returns: the loss, averaged over the batch.
        Raises: BatchError as `step` does; CaptureError or CutError if the model cannot be captured or cut in
            evaluation mode; MemoryCapError, CommunicationError and PeerError as `step` does.
        """
        self._drain()
        with self.calls.call("an evaluation", refuses_batches=True):
            rounds = self._microbatches(batch, training=False)
        with self.calls.call("an evaluation"):
            program = self.evaluation.program
            done = [(self.worker.run(part, program=program, training=False), part) for part in rounds]
            total = torch.tensor(read_loss(done, self.device), dtype=torch.float64)
            self.channel.all_reduce(total)
        return float(total)

    def _microbatches(self, batch: Mapping[str, Tensor], *, training: bool) -> list[list[Microbatch]]:
        """Rounds of micro-batches, each with its share of the loss."""
        split = self.batches.split(batch, training=training)
        start = time.perf_counter()
        agree_on_shapes(self.channel, signature_of(batch), split.refusal)
        self._agreeing_s = time.perf_counter() - start
        microbatches = self.batches.microbatches(split, step=self.steps_done, training=training)
        self.ledger.set("batch", self.batches.held_bytes(batch))
        return self.batches.in_rounds(microbatches)

    def _drain(self) -> None:
        """End what is in flight, before anything that is not a step."""
        if self.steady is not None and self.steady.fed:
            with self.calls.call(f"the end of step {self.steps_done}"):
                self.steady.drain()

    def _feed(self, batch: Mapping[str, Tensor]) -> None:
        """Begin a step of a pipeline that does not drain."""
        assert self.steady is not None
        split = self.batches.split(batch, training=True)
        with self.calls.call(f"step {self.steps_done + 1}", refuses_batches=split.refusal is not None):
            if self.steady.agree(signature_of(batch), split.refusal):
                self.steady.drain()
            if split.refusal is not None:
                raise split.refusal
            microbatches = self.batches.microbatches(split, step=self.steps_done, training=True)
            self.steady.feed(self.steps_done, microbatches, self.batches.held_bytes(batch))
            self.steps_done += 1

    def _new_reports(self) -> list[StepReport]:
        new = [] if self.steady is None else self.steady.take_reports()
        self.report = new[-1] if new else self.report
        return new

    def predict(self, cluster: Cluster | None = None, *, rehearsed: bool = True) -> Timeline:
        """Simulate a step with the times that the ranks take alone. Every rank calls it, before training.

        cluster: its links are used; by default that between ranks 0 and 1 is measured.  rehearsed: False for
        the times of the plan, so that no rank runs anything.
        Returns: when what happens, in seconds from the start of the step, and bytes held.
        Raises: CommunicationError or PeerError if another rank does not do the same.
        """
        self._drain()
        if not rehearsed:
            return self._shown(self.forecast().planned())
        with self.calls.call("a prediction"), attributes_kept(self.captured.blueprint.model):
            self.rehearsals = Rehearsals(self.forecast(), cluster)
            return self._shown(self.rehearsals.first)

    def rehearse(self) -> Timeline:
        """Simulate a step at the machine's pace of this moment; as `predict`, which it is the first time.
        Every rank calls it, between two steps. It takes about as long as one, and changes nothing.

        Raises: CommunicationError or PeerError as `predict`.
        """
        if self.rehearsals is None:
            return self.predict()
        self._drain()
        with self.calls.call("a rehearsal"), attributes_kept(self.captured.blueprint.model):
            return self._shown(self.rehearsals.rehearse())

    def _shown(self, predicted: Timeline) -> Timeline:
        return predicted if self.plan.steady is None else full_steps(predicted, self.plan.steady)

    def measured(self) -> Timeline:
        """The last step of all ranks; three in a row where the pipeline does not drain. Every rank calls it.

        Times, in seconds, count from the start of the first rank where all share a clock, else from each
        one's own. Raises: CommunicationError or PeerError if another rank does not do the same."""
        self._drain()
        return self.record.timeline(self.program.pairs, self.plan.steady)

    def save(self, directory: Path | str, *, extra: Mapping[str, Any] | None = None, keep: int = 2) -> Path:
        """Write a checkpoint that any plan of this model can load. Every rank calls it.

        directory: of this run's checkpoints, each in a folder of its own; the same on every rank.
        extra: JSON-able values to get back from `load`, such as the position in the data.
        keep: newest checkpoints kept, at least 1; older ones are removed.
        Returns: the path of the new one.
        Raises: CheckpointError on all ranks if any of them cannot write its part; PeerError if one failed;
            ConfigError if none is to be kept.
        """
        if keep < 1:
            raise ConfigError(f"keep={keep} keeps no checkpoint", hint="keep 1 or more")
        self._drain()
        with self.calls.call("saving a checkpoint"):
            return self.checkpoint.save(Path(directory), step=self.steps_done, extra=extra or {}, keep=keep)

    def load(self, directory: Path | str) -> dict[str, Any]:
        """Continue from the newest checkpoint in `directory`; returns what `save` got as `extra`. Every rank
        calls it. Steps go on to count from there.

        Raises: CheckpointError on all ranks if there is none, it is damaged or of another model.
        """
        self._drain()
        with self.calls.call("loading a checkpoint", heals=True):
            self.steps_done, extra = self.checkpoint.load(Path(directory))
            self.ledger.set("optimizer", self.weights.sizes["optimizer"])
            return extra

    def close(self) -> None:
        """Wait for the other ranks and disconnect; the end of a `with` does it. It may be called again.

        Raises: PeerError if another rank failed; CommunicationError if one was lost.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.tier is not None:
                self.tier.close()
        finally:
            self.watch.__exit__(kind, error, trace)
