"""Pipeline: the model, cut by a plan, trained by the ranks together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils._pytree import tree_map

from .action_hooks import Look, OnAction
from .clusters.devices import peak_flops_per_s
from .forecast import Forecast
from .ir.cluster import Cluster
from .ir.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    ConfigError,
    CutError,
    PipeloomError,
    PlanError,
    of_type,
    shown,
)
from .ir.plan import Plan, load_plan
from .ir.text import format_bytes
from .ir.timeline import Timeline
from .lowering.passes import lower
from .lowering.steady import SteadyRows
from .pipeline_request import (
    pipeline_settings,
    plan_on_rank_0,
    refuse_parts_of_job,
    require_same_settings,
    require_same_weights,
)
from .rank_stages import RankStages, StageVariants
from .ranks import join_ranks, limit_memory, rank_device, require_same_plan
from .run_options import Options, mixed_precision
from .runnable import refuse_torn_updates, require_runnable_plan, require_training
from .runtime import checkpoint
from .runtime.allocator import give_back_freed_memory, keep_freed_memory
from .runtime.batches import agree_on_batch, read_loss
from .runtime.channel import Channel
from .runtime.checkpoint import SafetensorsFolder, TrainState, find_weights, write_weights
from .runtime.first_batch import FirstBatches
from .runtime.ledger import Ledger, out_of_memory_told
from .runtime.open_tier import open_tier
from .runtime.optimizers import optimizers_of
from .runtime.rank import Rank
from .runtime.recorder import DeviceClock, HostClock, Recorder
from .runtime.tier import Tier
from .steady_run import SteadyRun
from .step_reports import StepRecord, StepReport, full_steps
from .step_run import FlushedRun, Run, StepBatches
from .tracer.autocast import autocast_around
from .tracer.capture import capture
from .tracer.captured import Captured
from .tracer.example import Batch, BatchForm, given_to, job_of
from .tracer.guards import attributes_kept
from .tracer.job import Job
from .tracer.job_calls import sample_batch
from .tracer.split_words import split_words
from .verification import verify_once

Data: TypeAlias = Literal["every", "first"]
"""Which ranks give the batches."""


class Pipeline:
    """Trains a model on several ranks. Every rank makes one and calls it with the same batch.

    Under torchrun or `pipeloom train` the ranks are processes; `group` may name an existing process group
    or a DeviceMesh with a dimension "pp". A plan for one rank needs neither. Use it in a `with`, or call
    `close()`; otherwise it closes when the script ends, and other ranks are not told of a `sys.exit(1)`.

    model: a module; or what makes one, as `lambda: Net(config)`: then each rank makes only what is its own,
        drawn as `seed` says. Or a `Job`, which has all that follows up to `weight`.
    example: a batch of the loader, for its shapes: a dictionary (or `BatchEncoding`) of what the forward
        takes, a tuple, or one tensor.
    loss: (outputs, batch) -> scalar. Where batches are tuples, `(outputs, *parts)`, as for
        `torch.nn.functional.cross_entropy`: so many of their last parts are the loss's. By default the
        model's own output, or its `.loss`.
    optimizer: parameters -> torch optimizer; it gets pairs (name, parameter) if its argument is called
        `named_parameters`. By default AdamW(lr=1e-3).
    weight: see `Job`.
    plan: a plan or the path of its file, the same on every rank. By default rank 0 measures the model, plans
        for as many ranks as there are, with the planner "auto", and tells the others; a plan for the same
        model, machine and settings is kept for a day.
    settings: fields of `PlanSettings`, as microbatches=8 or memory="16GiB", and of `Options`, as seed=1 or
        clip_norm=1.0. By default a micro-batch has the rows of the example, shared out by `microbatches`.
    options: those of `Options` together.
    data: "every": each rank gives the same batches. "first": rank 0 gives them, and each other rank, whose
        own are not looked at, is sent what its stages read (between accelerators, all of it).
    on_action: called after each F, B, I and W of this rank: (its text, such as "1F0", name -> tensor made).
    find_nan: look for the first number that is not finite, and raise NumbersError that names the op; slow.
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
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x, y = torch.ones(8, 8), 9 * torch.ones(8, 1)
    >>> with pipeloom.Pipeline(net, example=(x, y), loss=torch.nn.MSELoss(), microbatches=2) as pipeline:
    ...     losses = [pipeline.step((x, y)) for _ in range(3)]  # started by torchrun, each rank does the same
    >>> losses[0] > losses[1] > losses[2]
    True
    """

    def __init__(
        self,
        model: Job | nn.Module | Callable[[], nn.Module],
        plan: Plan | Path | str | None = None,
        *,
        example: Batch | None = None,
        loss: Callable[..., Tensor] | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        weight: Callable[[Mapping[str, Tensor]], float | Tensor] | None = None,
        data: Data = "every",
        on_action: OnAction | None = None,
        find_nan: bool = False,
        options: Options | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        channel: Channel | None = None,
        captured: Captured | None = None,
        **settings: Any,
    ) -> None:
        if data not in get_args(Data):
            raise ConfigError(f"data is {data!r}", hint=f"use {' or '.join(get_args(Data))}")
        asked = pipeline_settings(options or Options(), settings)
        self.options = asked.options
        self.device = rank_device(self.options)
        self._refuse_autocast_around()
        if isinstance(model, Job):
            refuse_parts_of_job(example=example, loss=loss, optimizer=optimizer, weight=weight)
            self.job, self._form = model, BatchForm()
        else:
            self.job, self._form = job_of(model, example, loss=loss, optimizer=optimizer, weight=weight)
        if plan is None:
            self.job = asked.longest(self.job)
            plan, made = plan_on_rank_0(self.job, asked, rows=self._form.rows, group=group, channel=channel)
            captured = captured or made
        else:
            asked.refuse_for_plan()
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        require_runnable_plan(self.plan)
        self.watch, self._open_channel = join_ranks(
            self.plan, self.device, self.options, group=group, channel=channel
        )
        self.rank, self.ranks = self.watch.rank, self.watch.ranks
        self.tier: Tier | None = None
        self.steps_done = 0
        self.report: StepReport | None = None
        self.watch.__enter__()
        with ExitStack() as ended:  # where it cannot be built: the others are told, and no thread stays
            ended.push(self)
            self.watch.check()
            require_same_settings(self.watch, asked, self._form.rows)
            if isinstance(model, nn.Module):
                require_same_weights(self.watch, model, self.options.timeout_s)
            rank_stages = self._cut_model(captured)
            if self.rank == 0:  # the others make their weights, and wait where all foresee what a step holds
                verify_once(self.job, self.plan, self.captured, self.options)
            self._make_weights(rank_stages)
            self._warn_of_what_cannot_be_saved()
            given = given_to(self.job)
            self._given = [] if given is None else [(p, p.requires_grad) for p in given.parameters()]
            self._first: FirstBatches | None = None
            if data == "first":
                functions = self.training.planned.functions.values()
                # Messages between accelerators are for tensors there, and for pairs that the program has.
                sends_parts = self.device.type == "cpu" and self.drains_each_step
                self._first = FirstBatches(
                    self.channel,
                    {name for each in functions for name in each.batch},
                    self._form.tensors,
                    whole=self.job.weight is not None or not sends_parts,
                )
            self._run = self._make_run(rank_stages)
            if self.device.type != "cpu" and self.ranks > 1:
                self._load_kernels()
            if on_action is not None or find_nan:
                self.worker.look = Look(self.captured, self.stages, on_action, find_nan)
            ended.pop_all()

    def _cut_model(self, captured: Captured | None) -> RankStages:
        """Capture the model and cut it as planned, and open the channel to the other ranks."""
        job, plan, options = self.job, self.plan, self.options
        require_same_plan(self.watch, plan, options.timeout_s)
        if plan.ranks != self.ranks:
            raise PlanError(
                f"the plan is for {plan.ranks} ranks, but {self.ranks} were started",
                hint="start as many ranks as the plan has, or plan again",
            )
        if self.device.type == "cpu":
            (give_back_freed_memory if plan.memory.offloads else keep_freed_memory)()
        if captured is None:
            captured = capture(
                job, plan.microbatch_size, autocast=mixed_precision(options.autocast, options.device)
            )
        self.captured = split_words(captured, plan.split_words)
        refuse_torn_updates(plan, self.captured)
        self.stages = plan.stage_graph(self.captured.graph)
        self.program = lower(
            plan.as_schedule,
            plan.replicated(self.stages),
            policy=plan.memory,
            updates=plan.updates,
            clips=options.clip_norm is not None,
        )
        self.channel = self._open_channel(self.program)
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
        self.training = StageVariants(rank_stages)
        self.evaluation = StageVariants(rank_stages, self.training)
        self.with_outputs = StageVariants(rank_stages, self.training, with_outputs=True)
        return rank_stages

    def _make_weights(self, rank_stages: RankStages) -> None:
        self.captured.start_over()
        self.ledger = Ledger(self.rank, self.plan.caps[self.rank] if self.plan.caps else None)
        if self.ledger.cap_bytes is not None and self.device.type != "cpu":
            self.watch.on_exit(limit_memory(self.device, self.ledger.cap_bytes))
        self.recorder = Recorder(self.rank, HostClock() if self.device.type == "cpu" else DeviceClock())
        read = {name for s in rank_stages.indices for name in self.stages.params[self.stages.origin(s)]}
        size = sum(p.bytes for p in self.captured.graph.parameters if p.name in read)
        with out_of_memory_told(self.ledger, lambda: f"start-up, with {format_bytes(size)} of parameters"):
            self.weights = rank_stages.weights(self.program)
        for kind, size in self.weights.sizes.items():
            self.ledger.set(kind, size)
        self.expected = self.forecast().untimed()
        self.schedulers: list[LRScheduler] = []
        optimizer = self.weights.optimizer
        if self.options.scheduler is not None and optimizer is not None:
            # PyTorch's schedulers take no optimizer but its own: one that holds several gets one for each.
            inner = (optimizer,) if isinstance(optimizer, Optimizer) else optimizers_of(optimizer)
            self.schedulers = [self.options.scheduler(each) for each in inner]
            if odd := [each for each in self.schedulers if not hasattr(each, "step")]:
                raise ConfigError(
                    f"Options.scheduler returned {of_type(odd[0])}", hint="return a scheduler of torch.optim"
                )
            if any(isinstance(each, ReduceLROnPlateau) for each in self.schedulers):
                raise ConfigError(
                    "ReduceLROnPlateau is stepped with a loss, and Options.scheduler without one",
                    hint="use a scheduler that counts steps",
                )

    def _make_run(self, rank_stages: RankStages) -> Run:
        plan, options = self.plan, self.options
        self.tier = open_tier(plan, rank_stages.indices, self.device, options.offload_dir, self.rank)
        if self.tier is not None:
            self.watch.on_exit(self.tier.close)
        self.worker = Rank(
            program=self.program,
            weights=self.weights,
            channel=self.channel,
            ledger=self.ledger,
            recorder=self.recorder,
            watch=self.watch,
            clip_norm=options.clip_norm,
            tier=self.tier,
            after_step=partial(_step_all, self.schedulers),
        )
        self.batches = StepBatches(
            job=self.job,
            plan=plan,
            rank=self.rank,
            device=self.device,
            seed=options.seed,
            training=self.training,
            tensors=self._form.tensors if self._first is None else _as_it_is,
            everywhere=self._first is None,
        )
        self.record = StepRecord(
            channel=self.channel,
            recorder=self.recorder,
            ledger=self.ledger,
            device=self.device,
            peak_flops_per_s=self._peak_flops_per_s(),
        )
        stages = plan.replicated(self.stages)
        kind: Callable[..., Run] = FlushedRun
        if plan.steady is not None and plan.updates is not None:
            rows = SteadyRows(
                step=plan.steady,
                stages=stages,
                updates=plan.updates,
                policy=plan.memory,
                clips=options.clip_norm is not None,
            )
            kind = partial(SteadyRun, rows=rows)
        run = kind(batches=self.batches, worker=self.worker, record=self.record)
        self.channel.open_groups(run.groups(stages, plan.placement))
        return run

    def _load_kernels(self) -> None:
        """Do this rank's actions once, without the others. To load a kernel, and to pin memory, CUDA may wait
        for all that runs, and so for a receive that was posted ahead, whose sender waits for this rank."""
        with self._call("the first run of its kernels"), attributes_kept(self.captured.blueprint.model):
            self.forecast().rehearsal().time_actions(1 if self.tier is None else None)
            torch.accelerator.synchronize(self.device)

    def _peak_flops_per_s(self) -> float | None:
        """The sum over all ranks' devices; None if one of them is not built in."""
        rounded = torch.get_float32_matmul_precision() != "highest"  # to TF32 or less, whose peak is another
        if self.device.type == "cpu" or (rounded and self.options.autocast is None):
            return None
        name = torch.get_device_module(self.device).get_device_name(self.device)
        largest = max(self.captured.graph.parameters, key=lambda p: p.bytes, default=None)
        dtype = "bfloat16" if self.options.autocast is not None else largest.dtype if largest else ""
        peaks = self.channel.all_gather_object(peak_flops_per_s(name, dtype))
        return None if None in peaks else sum(peaks)

    def forecast(self) -> Forecast:
        """This rank's part in predicting a step."""
        batch = sample_batch(self.job, 0, self.plan.microbatch_size)
        return Forecast(
            plan=self.plan,
            program=self.program,
            variant=self.training.planned,
            sample={n: t.to(self.device) for n, t in batch.items()},
            weights=self.weights,
            clips=self.options.clip_norm is not None,
            channel=self.channel,
            clock=self.recorder.clock,
            device=self.device,
            tier=self.tier,
        )

    def step(self, batch: Batch | None = None) -> float:
        """Train on one batch: split it into micro-batches, run the schedule, update.

        batch: tensors whose first dimension is the batch, as the example; the same on every rank, or with
            data="first" on rank 0. Its rows are spread evenly over the micro-batches; another sequence length
            than before is captured anew. Or a list of batches, each split by itself; their losses count by
            rows, or by the job's `weight`.
        Returns: the loss, averaged over the batch, on every rank.
        Raises: BatchError on all ranks if the batch cannot be split or the ranks have different ones; the
            next call may bring another batch. ScheduleError for a plan that only evaluates; MemoryCapError
            if a rank would pass its cap or its device has no more memory; OffloadError and CommunicationError
            if a copy or a message fails; PeerError if another rank failed; PipeloomError if an earlier call
            was broken off and this one cannot go on from there, which holds for all methods.
        """
        before, reports = self.steps_done, list(self.steps([batch]))
        if self.steps_done == before:
            raise BatchError("rank 0 was given no batch", hint="give step() a batch on rank 0")
        return reports[-1].loss

    @property
    def drains_each_step(self) -> bool:
        """Whether nothing is in flight between two steps: the plan's weights are updated with a flush."""
        return self.plan.steady is None

    def steps(self, batches: Iterable[Batch | None]) -> Iterator[StepReport]:
        """Train on batches one after the other, without draining the pipeline between them if the plan's
        weights are updated without a flush; with the same numbers as `step`, which drains each time.

        batches: each as `step` takes it.
        Yields: one report per batch, in order; without a flush up to three batches late, four on a device.
            What else is called between two of them, such as `evaluate`, drains first.
        Raises: BatchError and all else that `step` raises; PipeloomError once OneCycleLR has had its steps;
            ConfigError if parameters of the given module were frozen or thawed since.
        """
        require_training(self.plan)
        self._run.drain()
        self._take_reports()  # of batches that an earlier caller fed, and did not wait for
        # PyTorch refuses only once the update is made, when nothing can be saved. Counted in batches: without
        # a flush ranks have made different numbers of updates.
        if any(parameter.requires_grad is not trained for parameter, trained in self._given):
            raise ConfigError(
                "requires_grad of a parameter of the given module has changed, of which a copy is trained",
                hint="make another Pipeline of it, whose load_state_dict() takes this one's state_dict()",
            )
        left = min(map(_steps_left, self.schedulers), default=inf)
        for number, batch in enumerate(batches if self._first is None else self._first.all(batches)):
            if number >= left:
                raise PipeloomError(
                    f"the scheduler OneCycleLR is over after {self.steps_done} steps",
                    hint="give it the steps of the whole run as total_steps; you can still save this one",
                )
            self._refuse_autocast_around()
            self._run.feed(self.steps_done, batch)
            self.steps_done += 1
            yield from self._take_reports()
        self._run.drain()
        yield from self._take_reports()

    def _take_reports(self) -> list[StepReport]:
        taken, self._run.reports = self._run.reports, []
        self.report = taken[-1] if taken else self.report
        return taken

    @contextmanager
    def _call(
        self, what: str, *, heals: bool = False, refuses: tuple[type[PipeloomError], ...] = ()
    ) -> Iterator[None]:
        """Do something that is not a step, once nothing is in flight."""
        self._run.drain()
        with self._run.call(what, heals=heals, refuses=refuses):
            yield

    def evaluate(self, batch: Batch | None = None) -> float:
        """The loss of one batch in evaluation mode, on every rank. Nothing is updated.

        batch: as `step` takes it.
        Returns: the loss, averaged over the batch.
        Raises: BatchError as `step` does; CaptureError or CutError if the model cannot be captured or cut in
            evaluation mode; MemoryCapError, CommunicationError and PeerError as `step` does.
        """
        return self._evaluate(batch, self.evaluation)

    def outputs(self, batch: Batch | None = None) -> tuple[float, dict[str, Tensor]]:
        """The loss of one batch in evaluation mode, and the model's outputs; on every rank.

        batch: as `step` takes it.
        Returns: the loss, and by name the outputs that have a row for each of the batch and depend on
            parameters, on the CPU: the keys of a dictionary, "0", "1" of a tuple, an object's attributes,
            "output" if there is one.
        Raises: as `evaluate`; BatchError too for an output that has rows in some micro-batches only,
            CaptureError for a model that is cut between its modules.
        """
        loss = self._evaluate(batch, self.with_outputs)
        mine = {m: {n: t.cpu() for n, t in named.items()} for m, named in self.worker.outputs.items()}
        self.worker.outputs.clear()
        with self._call("gathering outputs"):
            everyone = self.channel.all_gather_object(mine)
        parts: dict[str, dict[int, Tensor]] = {}
        for theirs in everyone:
            for microbatch, named in theirs.items():
                for name, tensor in named.items():
                    parts.setdefault(name, {})[microbatch] = tensor
        count = max(map(len, parts.values()), default=0)
        for name in sorted(name for name, made in parts.items() if len(made) < count):
            raise BatchError(
                f"{name} has a row for each of the batch in some micro-batches only, depending on how many "
                "rows they have",
                hint=f"let {name} have as many rows as the batch, as by squeeze(-1) in place of squeeze()",
            )
        return loss, {name: torch.cat([made[m] for m in sorted(made)]) for name, made in parts.items()}

    def _refuse_autocast_around(self) -> None:
        if self.options.autocast is None and autocast_around(self.device):
            raise ConfigError(
                "torch.autocast is on around the pipeline, which would compute part of it in lower precision",
                hint="leave it out, and give Pipeline(autocast=torch.bfloat16)",
            )

    def _evaluate(self, given: Batch | None, variants: StageVariants) -> float:
        self._refuse_autocast_around()
        self._run.drain()
        with self._run.call("an evaluation", refuses=(BatchError, CaptureError, CutError)):
            batch = given if self._first is None else self._first.take(given, whole=True) or {}
            agree = partial(agree_on_batch, self.channel)
            part, size = self.batches.take(batch, step=self.steps_done, variants=variants, agree=agree)
            self.ledger.set("batch", size)
        with self._run.call("an evaluation"):
            losses = self.worker.run(part, program=variants.evaluation_program, training=False)
            total = torch.tensor(read_loss(losses, part, self.device), dtype=torch.float64)
            self.channel.all_reduce(total)
        return float(total)

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first group. Raises: ConfigError on a rank that trains nothing."""
        if not self.weights.optimizers:
            raise ConfigError(f"rank {self.rank} trains no parameter", hint="ask rank 0")
        return float(self.weights.optimizers[0].param_groups[0]["lr"])

    @property
    def grad_norm(self) -> float | None:
        """Of the last step's gradients before clipping; None where `clip_norm` is."""
        return None if self.report is None else self.report.grad_norm

    def predict(self, cluster: Cluster | None = None, *, rehearsed: bool = True) -> Timeline:
        """Simulate a step with the times that the ranks take alone. Every rank calls it, before training or
        between two steps; it changes nothing.

        cluster: its links are used; by default that between ranks 0 and 1 is measured.  rehearsed: False for
        the times of the plan, so that no rank runs anything.
        Returns: when what happens, in seconds from the start of the step, and bytes held.
        Raises: CommunicationError or PeerError if another rank does not do the same.
        """
        with self._call("a prediction"), attributes_kept(self.captured.blueprint.model):
            forecast = self.forecast()
            predicted = forecast.rehearsed(cluster) if rehearsed else forecast.planned()
        return predicted if self.plan.steady is None else full_steps(predicted, self.plan.steady)

    def measured(self) -> Timeline:
        """The last step of all ranks; three in a row where the pipeline does not drain. Every rank calls it.

        Times, in seconds, count from the start of the first rank where all share a clock, else from each
        one's own. Raises: CommunicationError or PeerError if another rank does not do the same."""
        self._run.drain()
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
        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep is {keep!r}", hint="keep 1 checkpoint or more")
        if not isinstance(extra, Mapping | None):
            raise ConfigError(f"extra is {of_type(extra)}", hint="give a dictionary of what JSON can hold")
        with self._call("saving a checkpoint", refuses=(CheckpointError,)):
            state = {"user": dict(extra or {}), "seed": self.options.seed, **self._schedules()}
            return checkpoint.save(
                Path(directory),
                self._train_state(self.weights.previous),
                step=self.steps_done,
                extra=state,
                channel=self.channel,
                keep=keep,
            )

    def _schedules(self) -> dict[str, Any]:
        """What `save` writes of schedulers. Raises: CheckpointError if JSON cannot hold one's state."""
        if not self.schedulers:
            return {}
        names = [_scheduler_name(scheduler) for scheduler in self.schedulers]
        states = [_in_numbers(scheduler.state_dict()) for scheduler in self.schedulers]
        for name, state in zip(names, states, strict=True):
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the state of the scheduler {name} cannot be saved as JSON: {error}",
                    hint="keep what JSON can hold in its attributes; or let state_dict() leave the rest out",
                ) from None
        one_or_all = states[0] if len(states) == 1 else {"schedulers": states}
        return {"scheduler": one_or_all, "scheduler_names": names}

    def _warn_of_what_cannot_be_saved(self) -> None:
        try:
            checkpoint.refuse_unsaved(self._train_state({}), self._schedules())
        except CheckpointError as error:
            warnings.warn(f"save() will fail: {error.message}", stacklevel=3)

    def load(self, directory: Path | str) -> dict[str, Any]:
        """Continue from the newest checkpoint in `directory`; returns what `save` got as `extra`. Every rank
        calls it. Steps go on to count from there.

        A pipeline that keeps versions of its weights takes the previous one from there. In a checkpoint
        without one, as of a run with a flush, it is the same as the newest.
        Raises: CheckpointError on all ranks if there is none, it is damaged or of another model, or its LR
        schedulers are others.
        """
        previous: dict[str, Tensor] = {}
        with self._call("loading a checkpoint", heals=True, refuses=(CheckpointError,)):
            part, overwrite = self._train_state(previous), self._run.overwrite
            step, state = checkpoint.load(
                Path(directory),
                part,
                channel=self.channel,
                refuse=self._refuse_other_schedulers,
                overwrite=overwrite,
            )
            self.weights.restart_versions(step if self.weights.updates is not None else 0, previous)
            self.weights.cast_parameters()
            if self.schedulers and "scheduler" in state:
                for scheduler, loaded in zip(self.schedulers, _scheduler_states(state), strict=True):
                    scheduler.load_state_dict(checkpoint.like_live(loaded, scheduler.state_dict()))
                    rates = zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=False)
                    for group, rate in rates:
                        if not group["params"]:  # all on other ranks: the rates of others were saved by name
                            group["lr"] = rate
            self.steps_done = step
            self.ledger.set("optimizer", self.weights.sizes["optimizer"])
            return dict(state["user"])

    def _refuse_other_schedulers(self, state: Mapping[str, Any]) -> None:
        """A checkpoint without schedulers, or with what this pipeline has none for, is loaded."""
        if not self.schedulers or "scheduler" not in state:
            return
        names, count = [_scheduler_name(each) for each in self.schedulers], len(_scheduler_states(state))
        saved = state.get("scheduler_names")  # which older checkpoints do not have
        if count != len(names):
            raise CheckpointError(
                f"optimizers with LR schedulers: the checkpoint has {count}, the job {len(names)}",
                hint="use the optimizers of the checkpoint, or load without Options.scheduler",
            )
        if saved is not None and saved != names:
            raise CheckpointError(
                f"the job's LR schedulers are {shown(names)}, the checkpoint's {shown(saved)}",
                hint="use the scheduler of the checkpoint, or load without Options.scheduler",
            )

    def state_dict(self, *, frozen: bool = True) -> dict[str, Tensor]:
        """The weights of the whole model on the CPU, by the names that its own `state_dict` has; on every
        rank, which needs the memory for it. Every rank calls it.

        frozen: with the parameters that are not trained.
        Raises: CommunicationError or PeerError as `predict`.
        """
        state = self._train_state({})
        left_out = {p.name for p in self.captured.graph.parameters if not (frozen or p.trainable)}
        with self._call("gathering the weights"):
            everyone = self.channel.all_gather_object(
                {n: t.to("cpu", copy=True) for n, t in state.model.items() if n not in left_out}
            )
        whole: dict[str, Tensor] = {}
        for theirs in everyone:
            whole = {**theirs, **whole}
        whole = checkpoint.joined(whole, state.rows)
        whole |= {alias: whole[name] for alias, name in state.aliases.items() if name in whole}
        ordered = [n for n in self.captured.blueprint.model.state_dict(keep_vars=True) if n in whole]
        return {name: whole[name] for name in ordered}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights from those of the whole model, of which each rank copies what is its own. Every rank
        calls it; the optimizer stays as it is.

        state: as the model's own `state_dict` gives it.
        Raises: CheckpointError on all ranks if one lacks a name or finds another shape; then nothing is
        changed.
        """
        self._load_weights(lambda name: state[name] if name in state else None)

    def load_weights(
        self, path: Path | str, *, named: Callable[[str], str | None] = lambda name: name
    ) -> None:
        """Take weights from safetensors: a file, or a folder as `save_pretrained` writes it, of which each
        rank reads what is its own. Every rank calls it.

        path: of the file or folder; tied weights may stand under one of their names only.
        named: the model's name of a weight -> its name in the files, or None for one that is not there and
            stays as it is, such as an adapter.
        Raises: CheckpointError as `load_state_dict`, and if there is no such file.
        """
        files = SafetensorsFolder(Path(path))

        def read(name: str) -> Tensor | None:
            stored = named(name)
            return None if stored is None else files.read(stored)

        self._load_weights(read, stays=lambda name: named(name) is None)

    def _load_weights(
        self, read: Callable[[str], Tensor | None], stays: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._run.drain()
        state = self._train_state({})
        found = find_weights(state, read, channel=self.channel, stays=stays)
        with self._call("loading weights"):
            self._run.overwrite()
            for name, tensor in found.items():
                state.model[name].copy_(tensor)
            self.weights.cast_parameters()
            if self.weights.updates is not None:
                self.weights.restart_versions(self.weights.newest, {})

    def export(self, path: Path | str) -> Path:
        """Write the model's weights as one safetensors file, by their own names. Every rank calls it; rank 0
        writes, and holds the whole model for it.

        path: of the file, in a folder that is made if it is not there.
        Returns: the path.  Raises: CheckpointError on all ranks if the file cannot be written.
        """
        path, whole = Path(path), self.state_dict()
        aliases = self._train_state({}).aliases
        with self._call("writing the weights", refuses=(CheckpointError,)):
            write_weights(path, {n: t for n, t in whole.items() if n not in aliases}, aliases, self.channel)
        return path

    def _train_state(self, previous: dict[str, Tensor]) -> TrainState:
        """previous: version of the parameters before the newest."""
        graph, weights = self.captured.graph, self.weights
        persistent = {b.name for b in graph.buffers if b.persistent}
        first: dict[int, str] = {}
        buffers = self.captured.blueprint.model.named_buffers(remove_duplicate=False)
        shared = {name: first.setdefault(id(buffer), name) for name, buffer in buffers}
        return TrainState(
            parameters=weights.params,
            buffers={n: t for n, t in weights.buffers.items() if n in persistent},
            optimizers=weights.optimizers,
            aliases={alias: p.own_name for p in graph.parameters for alias in p.aliases}
            | {
                alias: name
                for alias, name in shared.items()
                if name in persistent and alias not in persistent
            },
            rows=graph.rows,
            previous=previous,
            keeps_previous=weights.updates is not None,
        )

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


def _as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What rank 0 has sent."""
    return batch


def _step_all(schedulers: list[LRScheduler]) -> None:
    for scheduler in schedulers:
        scheduler.step()


def _steps_left(scheduler: LRScheduler) -> float:
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_steps_left, scheduler._schedulers))
    return _steps_in_all(scheduler) - scheduler.last_epoch


def _steps_in_all(scheduler: LRScheduler) -> float:
    """After how many steps a scheduler refuses another: OneCycleLR does, also as one of several in turn."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_steps_in_all, scheduler._schedulers))
    if not isinstance(scheduler, SequentialLR):
        return inf
    begins, ends = [0, *scheduler._milestones], [*scheduler._milestones, inf]
    over = [begin + _steps_in_all(one) for begin, one in zip(begins, scheduler._schedulers, strict=True)]
    return min((steps for steps, end in zip(over, ends, strict=True) if steps < end - 1), default=inf)


def _in_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a scheduler of an optimizer whose rates are tensors, or numbers of NumPy."""

    def number(value: Any) -> Any:
        one = (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, np.generic)
        return value.item() if one else value

    numbers: dict[str, Any] = tree_map(number, state)
    return numbers


def _scheduler_name(scheduler: LRScheduler) -> str:
    """Its class, and those of the schedulers that it holds."""
    name = type(scheduler).__name__
    inner = [_scheduler_name(each) for each in getattr(scheduler, "_schedulers", ())]
    return f"{name}({', '.join(inner)})" if inner else name


def _scheduler_states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = state["scheduler"].get("schedulers", [state["scheduler"]])
    return states
