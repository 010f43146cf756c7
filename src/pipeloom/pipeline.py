"""Pipeline: the model, cut by a plan, trained by the ranks together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from .forecast import Forecast, Rehearsals
from .ir.cluster import Cluster
from .ir.errors import BatchError, ConfigError, PeerError, PipeloomError, PlanError
from .ir.graph import OpGraph
from .ir.plan import Plan, load_plan
from .ir.timeline import Timeline
from .ir.units import format_bytes
from .lowering.passes import lower
from .options import Options
from .rank_stages import EvaluationVariants, RankStages, TrainingVariants
from .ranks import JoinedRanks, join_ranks, rank_device
from .rate_schedulers import RateSchedulers, make_scheduler
from .runnable import refuse_torn_updates, require_runnable_plan, require_training
from .runtime.allocator import give_back_freed_memory, keep_freed_memory
from .runtime.batches import agree_on_shapes, signature_of, split_batch
from .runtime.checkpoint import checkpoint
from .runtime.checkpoint.state import TrainState
from .runtime.failure.watch import Watch
from .runtime.ledger import Ledger
from .runtime.loss_scaling import loss_shares, read_loss
from .runtime.offload.open_tier import open_tier
from .runtime.offload.tier import Tier
from .runtime.out_of_memory import out_of_memory_told
from .runtime.recorder import CudaClock, HostClock, Recorder
from .runtime.step_state import Microbatch
from .runtime.transports.local_channel import LocalChannel
from .runtime.weights import Weights
from .runtime.worker import Worker
from .steady_run import SteadyRun, open_steady_run
from .step_reports import StepRecord, StepReport, full_steps
from .tracer.attributes import attributes_kept
from .tracer.capture import capture
from .tracer.captured import Captured
from .tracer.job import Job
from .tracer.job_calls import sample_batch
from .tracer.random import microbatch_seed
from .verification import verify_once


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCheckpoint:
    """One rank's part in checkpoints; all ranks call the same method.

    seed: of random ops.
    """

    graph: OpGraph
    weights: Weights
    scheduler: LRScheduler | RateSchedulers | None
    joined: JoinedRanks
    watch: Watch
    seed: int

    def save(self, directory: Path, *, step: int, extra: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint of a step, in which nothing is in flight; returns its path."""
        state = {"user": dict(extra), "seed": self.seed}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return self.watch.wait_for_all(
            "all ranks to save a checkpoint",
            lambda: checkpoint.save(
                directory,
                self._state(self.weights.previous),
                step=step,
                extra=state,
                group=self.joined.group,
                keep=keep,
            ),
        )

    def load(self, directory: Path) -> tuple[int, dict[str, Any]]:
        """Continue from the newest checkpoint: its step, and what the user had it keep.

        A pipeline that keeps versions takes its previous one from there. In a checkpoint without one, as of a
        run with a flush, it is the same as the newest.
        """
        previous: dict[str, Tensor] = {}
        step, state = self.watch.wait_for_all(
            "all ranks to load a checkpoint",
            lambda: checkpoint.load(directory, self._state(previous), group=self.joined.group),
        )
        self.weights.restart_versions(step if self.weights.updates is not None else 0, previous)
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        return step, dict(state["user"])

    def _state(self, previous: dict[str, Tensor]) -> TrainState:
        kept = {b.name for b in self.graph.buffers if b.persistent}
        return TrainState(
            parameters=self.weights.params,
            buffers={n: t for n, t in self.weights.buffers.items() if n in kept},
            optimizers=self.weights.optimizers,
            aliases={alias: p.name for p in self.graph.parameters for alias in p.aliases},
            previous=previous,
            keeps_previous=self.weights.updates is not None,
        )


@dataclass(frozen=True, kw_only=True)
class SplitBatch:
    """A batch cut into micro-batches, each with its share of the loss; or why that cannot be.

    parts: the inputs of each micro-batch, by name.
    """

    parts: tuple[Mapping[str, Tensor], ...] = ()
    shares: tuple[float, ...] = ()
    refusal: BatchError | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatches:
    """Splits batches for a plan's rank. rounds: of the schedule per training step.  seed: of random ops."""

    job: Job
    plan: Plan
    rank: int
    device: torch.device
    rounds: int
    seed: int
    training: TrainingVariants
    evaluation: EvaluationVariants

    def split(self, batch: Mapping[str, Tensor], *, training: bool) -> SplitBatch:
        """Never raises for a batch that cannot be used: the ranks have to agree on that first."""
        try:
            parts = split_batch(batch, self.plan.microbatches * (self.rounds if training else 1))
            shares = loss_shares(parts, self.job.weight)
        except BatchError as error:
            return SplitBatch(refusal=error)
        return SplitBatch(parts=tuple(parts), shares=tuple(shares))

    def microbatches(self, split: SplitBatch, *, step: int, training: bool) -> list[Microbatch]:
        """What the worker gets, with those inputs of this rank's micro-batches that its stages read.

        step: steps made before.

        Raises: BatchError if a size of micro-batch does not fit the plan.
        """
        variants = self.training if training else self.evaluation
        each = self.plan.microbatches // self.plan.replicas
        own = self.plan.replicas_on(self.rank)
        made = []
        for index, (part, share) in enumerate(zip(split.parts, split.shares, strict=True)):
            variant = variants.variant(part)
            here = index % self.plan.microbatches // each in own
            read = {name for functions in variant.functions.values() for name in functions.batch}
            made.append(
                Microbatch(
                    variant=variant,
                    inputs={n: _copy_to(self.device, t) for n, t in part.items() if here and n in read},
                    weight=share,
                    seed=microbatch_seed(self.seed, step, index),
                    number=step * each + index % each,
                )
            )
        return made

    def held_bytes(self, batch: Mapping[str, Tensor]) -> int:
        """Bytes of a batch that this rank needs: of the micro-batches of its own replicas."""
        whole = sum(tensor.nbytes for tensor in batch.values())
        return whole * self.plan.microbatches_on(self.rank) // self.plan.microbatches

    def in_rounds(self, microbatches: list[Microbatch]) -> list[list[Microbatch]]:
        """Those of each round of the schedule."""
        count = self.plan.microbatches
        return [microbatches[at : at + count] for at in range(0, len(microbatches), count)]


def _copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """From memory that is not pinned the host would wait for the device, at every tensor."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Calls:
    """Wraps all that a pipeline does with its worker, one call after the other."""

    def __init__(self, watch: Watch, worker: Worker, steady: SteadyRun | None = None) -> None:
        self._watch, self._worker, self._steady = watch, worker, steady
        self._broken = ""
        self._torn = False
        self._buffers: dict[str, Tensor] = {}

    @contextmanager
    def call(self, what: str, *, heals: bool = False, refuses_batches: bool = False) -> Iterator[None]:
        """Do `what`, such as "step 3".

        heals: it makes parameters, buffers and optimizer anew.
        refuses_batches: nothing is sent or computed yet, and all ranks raise a BatchError if one does. So it
            breaks nothing off: the next call starts from where this one did.
        Raises: PipeloomError if an earlier call was broken off and this one cannot go on from there;
            PeerError if another rank failed.
        """
        self._recover(heals)
        self._watch.check()
        self._buffers = dict(self._worker.weights.buffers)
        try:
            with out_of_memory_told(self._worker.ledger, lambda: what):
                yield
        except BaseException as error:
            if refuses_batches and isinstance(error, BatchError):
                raise
            first = str(error).partition("\n")[0]
            by = first if isinstance(error, PeerError) else f"{type(error).__name__}: {first}".rstrip(": ")
            self._broken, self._torn = f"{what} was broken off ({by})", self._worker.reduce_and_step.updating
            if self._steady is not None:  # its rows go over from step to step: none can be taken back alone
                self._torn = True
                self._steady.forget()
            if self._watch.ranks > 1:
                self._watch.fail(error)
            raise
        self._worker.reduce_and_step.updating = False
        self._buffers = {}  # what they were is not needed, and must not stay in memory

    def _recover(self, heals: bool) -> None:
        """Clear away what a broken call has left, or refuse to go on."""
        if not self._broken:
            return
        if self._watch.ranks > 1:
            raise PipeloomError(
                f"rank {self._watch.rank} cannot go on: {self._broken}, and messages to and from it are lost",
                hint="start all ranks again, and load the newest checkpoint",
            )
        if self._torn and not heals:
            raise PipeloomError(
                f"{self._broken} in the middle of its update: some parameters may be updated and others not",
                hint="load the newest checkpoint, or make the pipeline again",
            )
        self._worker.forget()
        for name, buffer in self._buffers.items():
            self._worker.weights.replace_buffer(name, buffer)
        self._broken, self._torn, self._worker.reduce_and_step.updating = "", False, False


class Pipeline:
    """Trains a job's model on the ranks of a plan. Every rank makes one and calls it with the same batch.

    Under torchrun or `pipeloom train` the ranks are processes; `group` may name an existing process group
    or a DeviceMesh with a dimension "pp". A plan for one rank needs neither. Use it in a `with`, or call
    `close()`; otherwise it closes when the script ends, and other ranks are not told of a `sys.exit(1)`.

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
    >>> plan = pipeloom.plan(job, ranks=1, microbatches=2, microbatch_size=4, cluster="a100-40")
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
        rank_stages = self._cut_model()
        if self.rank == 0:  # the others make their weights, and wait where all foresee what a step holds
            verify_once(self.job, self.plan, self.captured, self.options)
        self._make_ready(rank_stages)
        self.steps_done = 0
        self.report: StepReport | None = None
        self.rehearsals: Rehearsals | None = None

    def _cut_model(self) -> RankStages:
        """Capture the model and cut it as planned, and open the channel to the other ranks."""
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
        return rank_stages

    def _make_ready(self, rank_stages: RankStages) -> None:
        """Make the rank's weights, its worker, and what it tells of its steps."""
        self.captured.traced.clear()
        plan = self.plan
        self.ledger = Ledger(self.rank, plan.caps[self.rank] if plan.caps else None)
        read = {name for s in rank_stages.indices for name in self.stages.params[self.stages.origin(s)]}
        size = sum(p.bytes for p in self.captured.graph.parameters if p.name in read)
        with out_of_memory_told(self.ledger, lambda: f"start-up, with {format_bytes(size)} of parameters"):
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
        self.scheduler = make_scheduler(options.scheduler, self.weights.optimizer)
        self.tier = open_tier(plan, rank_stages.indices, self.device, options.offload_dir, self.rank)
        if self.tier is not None:
            self.watch.on_exit(self.tier.close)
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

    def _after_update(self) -> None:
        """In a pipeline that does not drain the learning rate follows each rank's own updates."""
        if self.scheduler is not None:
            self.scheduler.step()

    def forecast(self) -> Forecast:
        """This rank's part in predicting a step, for who wants more of it than `predict` and `rehearse` show.

        Raises: CaptureError if `Job.batch` gives no micro-batch of the plan's size.
        """
        batch = sample_batch(self.job, 0, self.plan.microbatch_size)
        return Forecast(
            plan=self.plan,
            program=self.program,
            variant=self.training.planned,
            sample={n: t.to(self.device) for n, t in batch.items()},
            weights=self.weights,
            rounds=self.options.accumulate,
            clips=self.options.clip_norm is not None,
            channel=self.channel,
            watch=self.watch,
            clock=self.recorder.clock,
            device=self.device,
            tier=self.tier,
        )

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
        self.watch.__exit__(kind, error, trace)
