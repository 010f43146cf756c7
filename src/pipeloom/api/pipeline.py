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
from ..ir.errors import PlanError
from ..ir.plan import Plan, load_plan
from ..ir.timeline import Timeline
from ..lowering import lower
from ..runtime import (
    CudaClock,
    HostClock,
    Ledger,
    LocalChannel,
    Microbatch,
    Recorder,
    Tier,
    Worker,
    agree_on_shapes,
    give_back_freed_memory,
    keep_freed_memory,
    open_tier,
    scaled_loss,
    signature_of,
)
from ..tracer import Captured, Job, attributes_kept, capture, sample_batch
from .calls import Calls
from .first_comparison import require_equal_once
from .forecast import Forecast, Rehearsals
from .options import Options
from .pipeline_checkpoint import PipelineCheckpoint
from .rank_stages import EvaluationVariants, RankStages, TrainingVariants
from .ranks import join_ranks, rank_device
from .runnable import refuse_torn_updates, require_runnable_plan, require_training
from .steady_run import open_steady_run
from .steady_timeline import full_steps
from .step_batches import StepBatches
from .step_reports import StepRecord, StepReport


class Pipeline:
    """Trains a job's model on the ranks of a plan. Every rank makes one and calls it with the same batch.

        with Pipeline(job, plan) as pipeline:
            for batch in batches:
                loss = pipeline.step(batch)

    Under torchrun or `pipeloom train` the ranks are processes; `group` may name an existing process group
    or a DeviceMesh with a dimension "pp". A plan for one rank needs neither. When a process on CPUs ends,
    groups are destroyed and dropped from its script's globals, as gloo's threads must end first: what else
    holds one is to be dropped by the script.

    captured: the job's model, captured for the plan's micro-batches; without it each rank captures it.

    A step that is broken off, as by Ctrl-C, leaves nothing to the next one; several ranks refuse to go on.

    Raises: PlanError if the plan was made for another model or number of ranks; ScheduleError if the
        runtime lacks what its schedule needs; MemoryCapError if it needs more memory than its caps allow;
        ConfigError if the process is not one of several ranks.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | Path,
        *,
        options: Options | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        channel: LocalChannel | None = None,
        captured: Captured | None = None,
    ) -> None:
        self._given, self.job, self.options = captured, job, options or Options()
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        require_runnable_plan(self.plan)
        self.device = rank_device(self.options)
        self.joined = join_ranks(self.plan, self.device, self.options, group=group, channel=channel)
        self.watch = self.joined.watch
        self.rank, self.ranks = self.watch.rank, self.watch.ranks
        self.tier: Tier | None = None
        self.watch.__enter__()
        with ExitStack() as ended:  # where it cannot be built: the others are told, and no thread stays
            ended.push(self)
            self.watch.check()
            self._build()
            ended.pop_all()
        self.calls = Calls(self.watch, self.worker, self.steady)

    def _build(self) -> None:
        job, plan, options = self.job, self.plan, self.options
        self.joined.require_same_plan(plan)
        if len(set(plan.placement)) != self.ranks:
            raise PlanError(
                f"the plan is for {len(set(plan.placement))} ranks, but {self.ranks} were started",
                hint="start as many ranks as the plan has, or plan again",
            )
        if self.device.type == "cpu":
            (give_back_freed_memory if plan.memory.offloads else keep_freed_memory)()
        self.captured = self._given or capture(job, plan.microbatch_size, autocast=options.autocast)
        refuse_torn_updates(plan, self.captured)
        self.stages = plan.stage_graph(self.captured.graph)
        self.program = lower(
            plan.as_schedule,
            plan.replicated(self.stages),
            policy=plan.memory,
            updates=plan.updates,
            clips=options.clip_norm is not None,
        )
        self.channel = self.joined.channel(self.program, self.device, options)
        rank_stages = RankStages(
            job=job,
            plan=plan,
            captured=self.captured,
            stages=self.stages,
            indices=tuple(s for s, rank in enumerate(plan.placement) if rank == self.rank),
            options=options,
            device=self.device,
            channel=self.channel,
        )
        self.training = TrainingVariants(rank_stages)
        self.evaluation = EvaluationVariants(rank_stages, self.training)
        if self.rank == 0:  # the others make their weights, and wait where all foresee what a step holds
            require_equal_once(Pipeline, job, plan, self.captured, options)
        self.captured.traced.clear()
        self.ledger = Ledger(self.rank, plan.caps[self.rank] if plan.caps else None)
        self.weights = rank_stages.weights(self.program)
        for kind, size in self.weights.sizes.items():
            self.ledger.set(kind, size)
        self._build_worker(rank_stages)

    def _build_worker(self, rank_stages: RankStages) -> None:
        job, plan, options = self.job, self.plan, self.options
        self.recorder = Recorder(self.rank, CudaClock() if self.device.type == "cuda" else HostClock())
        self.record = StepRecord(
            channel=self.channel, recorder=self.recorder, ledger=self.ledger, device=self.device
        )
        self.expected = self.forecast().untimed()
        optimizer = self.weights.optimizer
        self.scheduler = options.scheduler(optimizer) if options.scheduler and optimizer else None
        self.tier = open_tier(plan, rank_stages.indices, self.device, options.offload_dir, self.rank)
        self.worker = Worker(
            rank=self.rank,
            program=self.program,
            weights=self.weights,
            channel=self.channel,
            ledger=self.ledger,
            recorder=self.recorder,
            watch=self.watch,
            clip_norm=options.clip_norm,
            tier=self.tier,
            after_step=self._after_update if plan.updates is not None else lambda: None,
        )
        self.batches = StepBatches(
            job=job,
            plan=plan,
            rank=self.rank,
            device=self.device,
            rounds=options.accumulate,
            seed=options.seed,
            training=self.training,
            evaluation=self.evaluation,
        )
        self.steady = open_steady_run(
            plan,
            plan.replicated(self.stages),
            options,
            worker=self.worker,
            channel=self.channel,
            recorder=self.recorder,
            ledger=self.ledger,
            device=self.device,
        )
        self.checkpoint = PipelineCheckpoint(
            graph=self.captured.graph,
            weights=self.weights,
            scheduler=self.scheduler,
            joined=self.joined,
            watch=self.watch,
            seed=options.seed,
        )
        self.steps_done = 0
        self.report: StepReport | None = None
        self.rehearsals: Rehearsals | None = None

    def _after_update(self) -> None:
        """In a pipeline that does not drain the learning rate follows each rank's own updates."""
        if self.scheduler is not None:
            self.scheduler.step()

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train on one batch: split it into micro-batches, run the schedule, update.

        batch: tensors whose first dimension is the batch; the same on every rank. Its rows are spread
            evenly over the micro-batches; another sequence length than before is captured anew.
        Returns: the loss, averaged over the batch, on every rank.
        Raises: BatchError on all ranks if the batch cannot be split or the ranks have different ones; the
            next call may bring another batch.
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
            losses = [
                self._round(microbatches, last=index == len(rounds) - 1)
                for index, microbatches in enumerate(rounds)
            ]
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps_done += 1
            self.report = self.record.report(
                sum(losses),
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

        Yields: one report per batch, in order; without a flush up to three batches late. What else is called
            between two of them, such as `evaluate`, drains first.
        Raises: as `step`.
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

    def _round(self, microbatches: list[Microbatch], *, last: bool) -> float:
        return scaled_loss(self.worker.run(microbatches, update=last), microbatches)

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of one batch in evaluation mode, on every rank. Nothing is updated.

        Raises: BatchError as `step` does.
        """
        self._drain()
        with self.calls.call("an evaluation", refuses_batches=True):
            rounds = self._microbatches(batch, training=False)
        with self.calls.call("an evaluation"):
            total = torch.zeros(1, dtype=torch.float64, device=self.device)
            for microbatches in rounds:
                losses = self.worker.run(microbatches, program=self.evaluation.program, training=False)
                total += scaled_loss(losses, microbatches)
            self.channel.all_reduce(total)
        return float(total)

    def _microbatches(self, batch: Mapping[str, Tensor], *, training: bool) -> list[list[Microbatch]]:
        """Rounds of micro-batches, each with its share of the loss."""
        split = self.batches.split(batch, training=training)
        start = time.perf_counter()
        agree_on_shapes(self.channel, signature_of(batch), self.device, split.refusal)
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
        """
        self._drain()
        if not rehearsed:
            return self._shown(self.forecast().planned())
        with self.calls.call("a prediction"), attributes_kept(self.captured.blueprint.model):
            self.rehearsals = Rehearsals(self.forecast(), cluster)
            return self._shown(self.rehearsals.first)

    def rehearse(self) -> Timeline:
        """Simulate a step at the machine's pace of this moment; as `predict`, which it is the first time.
        Every rank calls it, between two steps. It takes about as long as one, and changes nothing."""
        if self.rehearsals is None:
            return self.predict()
        self._drain()
        with self.calls.call("a rehearsal"), attributes_kept(self.captured.blueprint.model):
            return self._shown(self.rehearsals.rehearse())

    def _shown(self, predicted: Timeline) -> Timeline:
        return predicted if self.plan.steady is None else full_steps(predicted, self.plan.steady)

    def forecast(self) -> Forecast:
        """This rank's part in predicting a step."""
        batch = sample_batch(self.job, 0, self.plan.microbatch_size)
        return Forecast(
            plan=self.plan,
            program=self.program,
            variant=self.training.planned,
            sample={n: t.to(self.device) for n, t in batch.items()},
            weights=self.weights,
            optimizer=self.job.optimizer,
            rounds=self.options.accumulate,
            clips=self.options.clip_norm is not None,
            channel=self.channel,
            watch=self.watch,
            clock=self.recorder.clock,
            device=self.device,
            tier=self.tier,
        )

    def measured(self) -> Timeline:
        """The last step of all ranks; three in a row where the pipeline does not drain. Every rank calls it.

        Times count from the start of the first rank where all share a clock, else from each one's own."""
        self._drain()
        return self.record.timeline(self.program.pairs, self.plan.steady)

    def save(self, directory: Path, *, extra: Mapping[str, Any] | None = None, keep: int = 2) -> Path:
        """Write a checkpoint that any plan of this model can load. Every rank calls it.

        extra: JSON-able values to get back from `load`, such as the position in the data.
        """
        self._drain()
        with self.calls.call("saving a checkpoint"):
            return self.checkpoint.save(directory, step=self.steps_done, extra=extra or {}, keep=keep)

    def load(self, directory: Path) -> dict[str, Any]:
        """Continue from the newest checkpoint in `directory`; returns what `save` got as `extra`.

        Raises: CheckpointError on all ranks if there is none, it is damaged or of another model.
        """
        self._drain()
        with self.calls.call("loading a checkpoint", heals=True):
            self.steps_done, extra = self.checkpoint.load(directory)
            self.ledger.set("optimizer", self.weights.sizes["optimizer"])
            return extra

    def close(self) -> None:
        """Wait for the other ranks and disconnect."""
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
