"""Pipeline: a plan, running. One object per rank, one call per step."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..ir.cluster import Cluster
from ..ir.errors import BatchError, CaptureError, PlanError
from ..ir.plan import Plan, load_plan
from ..ir.schedule import Program
from ..ir.timeline import Timeline
from ..lowering import lower
from ..runtime import (
    CudaClock,
    DistChannel,
    HostClock,
    Ledger,
    LocalChannel,
    Microbatch,
    PostedChannel,
    Recorder,
    Tier,
    TrainState,
    Variant,
    Watch,
    Weights,
    Worker,
    agree_on_layouts,
    agree_on_shapes,
    connect,
    give_back_freed_memory,
    keep_freed_memory,
    local_channels,
    loss_shares,
    open_tier,
    rows_of,
    scaled_loss,
    signature_of,
    split_batch,
    watch_ranks,
)
from ..runtime.checkpoint import checkpoint
from ..tracer import Captured, Job, capture, microbatch_seed, sample_batch
from .calls import Calls
from .evaluate import Evaluating
from .forecast import Forecast, Rehearsals
from .options import Options, StepReport
from .runnable import refuse_torn_updates, require_runnable, require_same_plan, require_training
from .variants import make_variant


@dataclass(eq=False)
class _Parts:
    """What a pipeline is made of, apart from its options."""

    job: Job
    plan: Plan
    captured: Captured
    train: Program
    variants: dict[tuple[str, ...], Variant] = field(default_factory=dict)


class Pipeline:
    """Trains a job's model on the ranks of a plan. Every rank makes one and calls it with the same batch.

        with Pipeline(job, plan) as pipeline:
            for batch in batches:
                loss = pipeline.step(batch)

    Under torchrun or `pipeloom train` the ranks are processes; `group` may name an existing process group
    or a DeviceMesh with a dimension "pp". A plan for one rank needs neither. When a process on CPUs ends,
    groups are destroyed and dropped from its script's globals, as gloo's threads must end first: what else
    holds one is to be dropped by the script.

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
    ) -> None:
        self.options = options or Options()
        plan = plan if isinstance(plan, Plan) else load_plan(plan)
        require_runnable(plan.schedule, plan.weights)
        self.device = self._own_device()
        self.group: dist.ProcessGroup | None = None
        self.local: LocalChannel | None = channel
        self.watch = self._join(plan, group, channel)
        self.rank, self.ranks = self.watch.rank, self.watch.ranks
        self.tier: Tier | None = None
        self.watch.__enter__()
        with ExitStack() as ended:  # where it cannot be built: the others are told, and no thread stays
            ended.push(self)
            self.watch.check()
            self._build(job, plan)
            ended.pop_all()
        self.calls = Calls(self.watch, self.worker)

    def _build(self, job: Job, plan: Plan) -> None:
        require_same_plan(plan, self.group or self.local)
        if len(set(plan.placement)) != self.ranks:
            raise PlanError(
                f"the plan is for {len(set(plan.placement))} ranks, but {self.ranks} were started",
                hint="start as many ranks as the plan has, or plan again",
            )
        options = self.options
        if self.device.type == "cpu":
            (give_back_freed_memory if plan.memory.offloads else keep_freed_memory)()
        captured = capture(job, plan.microbatch_size, autocast=options.autocast)
        refuse_torn_updates(plan, captured)
        stages = plan.stage_graph(captured.graph)
        train = lower(plan.as_schedule, plan.replicated(stages), policy=plan.memory)
        self.parts = _Parts(job=job, plan=plan, captured=captured, train=train)
        self.channel = self._channel(self.parts.train)
        self.own_stages = tuple(s for s, rank in enumerate(plan.placement) if rank == self.rank)
        self.stages = stages
        self.evaluating = Evaluating(
            job=job,
            plan=plan,
            captured=captured,
            stages=stages,
            own_stages=self.own_stages,
            device=self.device.type,
            autocast=options.autocast,
            like_training=self._variant_for,
            channel=self.channel,
        )
        self._variant(captured, signature_of(sample_batch(job, 0, plan.microbatch_size)))
        cap = plan.caps[self.rank] if plan.caps else None
        self.ledger = Ledger(self.rank, cap)
        self.weights = self._own_weights(captured)
        for kind, size in self.weights.sizes.items():
            self.ledger.set(kind, size)
        clock = CudaClock() if self.device.type == "cuda" else HostClock()
        self.recorder = Recorder(self.rank, clock)
        self.expected = self._forecast().untimed()
        optimizer = self.weights.optimizer
        self.scheduler = options.scheduler(optimizer) if options.scheduler and optimizer else None
        self.tier = open_tier(plan, self.own_stages, self.device, options.offload_dir, self.rank)
        self.worker = Worker(
            rank=self.rank,
            program=self.parts.train,
            weights=self.weights,
            channel=self.channel,
            ledger=self.ledger,
            recorder=self.recorder,
            watch=self.watch,
            clip_norm=options.clip_norm,
            tier=self.tier,
        )
        self.steps = 0
        self.report: StepReport | None = None
        self._rehearsals: Rehearsals | None = None

    def _own_device(self) -> torch.device:
        if self.options.device == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.options.device)

    def _join(
        self, plan: Plan, group: dist.ProcessGroup | DeviceMesh | None, channel: LocalChannel | None
    ) -> Watch:
        """Meet the other ranks. A plan for one rank needs none, unless the caller has a group."""
        if channel is not None:
            return channel.watch
        if group is None and len(set(plan.placement)) == 1 and not dist.is_initialized():
            self.local = local_channels(1, timeout_s=self.options.timeout_s)[0]
            return self.local.watch
        self.group = connect(self.device, group=group, timeout_s=self.options.timeout_s)
        return watch_ranks(self.group)

    def _channel(self, train: Program) -> PostedChannel:
        if self.group is None:
            assert self.local is not None, "without a group there is a channel"
            return self.local
        return DistChannel(
            self.group,
            self.watch,
            device=self.device,
            timeout_s=self.options.timeout_s,
            pairs=train.messages,
        )

    def _own_weights(self, captured: Captured) -> Weights:
        graph = captured.graph
        origins = [self.stages.origin(s) for s in self.own_stages]
        params = list(dict.fromkeys(n for s in origins for n in self.stages.params[s]))
        buffers = list(dict.fromkeys(n for s in origins for n in self.stages.buffers[s]))
        made = captured.blueprint.materialise(
            self.options.seed, [*params, *(b for b in buffers if b not in captured.constants)]
        )
        made |= {name: t for name, t in captured.constants.items() if name in buffers}
        return Weights(
            {n: nn.Parameter(made[n].to(self.device), graph.parameter[n].trainable) for n in params},
            {n: made[n].to(self.device) for n in buffers},
            self.parts.job.optimizer,
            keep_gradients=self.options.keep_gradients,
            device=self.device,
        )

    def _variant(self, captured: Captured, signature: tuple[str, ...]) -> Variant:
        plan = self.parts.plan
        stages = plan.stage_graph(captured.graph)
        agree_on_layouts(self.channel, stages)
        self.parts.variants[signature] = make_variant(
            captured,
            plan,
            stages,
            self.own_stages,
            device=self.device.type,
            compiled=self.options.compiled,
            policy=plan.memory,
        )
        return self.parts.variants[signature]

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train on one batch: split it into micro-batches, run the schedule, update.

        batch: tensors whose first dimension is the batch; the same on every rank. Its rows are spread
            evenly over the micro-batches; another sequence length than before is captured anew.
        Returns: the loss, averaged over the batch, on every rank.
        Raises: BatchError on all ranks if the batch cannot be split or the ranks have different ones.
        """
        start = time.perf_counter()
        require_training(self.parts.plan)
        with self.calls.call(f"step {self.steps + 1}"):
            rounds = self._microbatches(batch, training=True)
            self.recorder.begin()
            losses = [
                self._round(microbatches, last=index == len(rounds) - 1)
                for index, microbatches in enumerate(rounds)
            ]
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
            self.report = self._share(sum(losses), start)
        return self.report.loss

    def _round(self, microbatches: list[Microbatch], *, last: bool) -> float:
        return scaled_loss(self.worker.run(microbatches, update=last), microbatches)

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of one batch in evaluation mode, on every rank. Nothing is updated."""
        with self.calls.call("an evaluation"):
            total = torch.zeros(1, dtype=torch.float64, device=self.device)
            for microbatches in self._microbatches(batch, training=False):
                losses = self.worker.run(microbatches, program=self.evaluating.program, training=False)
                total += scaled_loss(losses, microbatches)
            self.channel.all_reduce(total)
        return float(total)

    def _microbatches(self, batch: Mapping[str, Tensor], *, training: bool) -> list[list[Microbatch]]:
        """Rounds of micro-batches, each with its share of the loss."""
        plan, job = self.parts.plan, self.parts.job
        rounds = self.options.accumulate if training else 1
        start = time.perf_counter()
        agree_on_shapes(self.channel, signature_of(batch), self.device)
        self.agreeing_s = time.perf_counter() - start
        parts = split_batch(batch, plan.microbatches * rounds)
        shares = loss_shares(parts, job.weight)
        made = [
            Microbatch(
                variant=self._variant_for(part) if training else self.evaluating.variant(part),
                inputs={name: t.to(self.device) for name, t in part.items()},
                weight=share,
                seed=microbatch_seed(self.options.seed, self.steps, index),
            )
            for index, (part, share) in enumerate(zip(parts, shares, strict=True))
        ]
        self.ledger.set("batch", sum(t.nbytes for t in batch.values()))
        return [made[i : i + plan.microbatches] for i in range(0, len(made), plan.microbatches)]

    def _variant_for(self, part: Mapping[str, Tensor]) -> Variant:
        signature = signature_of(part)
        if signature not in self.parts.variants:
            known, parts = next(iter(self.parts.variants)), self.parts
            try:
                captured = capture(
                    parts.job,
                    rows_of(part),
                    batch=part,
                    autocast=self.options.autocast,
                    like=parts.captured,
                )
                return self._variant(captured, signature)
            except (CaptureError, PlanError) as error:
                raise BatchError(
                    f"a micro-batch of {', '.join(signature)} does not fit the plan, which was made for "
                    f"{', '.join(known)}: {error.message}",
                    hint="pad or cut the batch to the planned size, or plan for this one",
                ) from None
        return self.parts.variants[signature]

    def _share(self, loss: float, start: float) -> StepReport:
        """Make one rank's figures known to all. start: of the step, in seconds of `time.perf_counter`."""
        events = self.recorder.events()
        busy = sum(e.duration_s for e in events if e.stream == "compute")
        waited = sum(e.duration_s for e in events if e.stream == "recv") + self.agreeing_s
        mine = [max(e.end_s for e in events), time.perf_counter() - start, busy, waited, self.ledger.peak]
        table = torch.zeros(self.ranks, len(mine), dtype=torch.float64)
        table[self.rank] = torch.tensor(mine)
        both = torch.cat([table.flatten(), torch.tensor([loss], dtype=torch.float64)]).to(self.device)
        self.channel.all_reduce(both)
        ends, walls, busy_s, waited_s, peaks = both[:-1].reshape(self.ranks, -1).T.tolist()
        return StepReport(
            loss=float(both[-1]),
            step_s=max(ends),
            wall_s=tuple(walls),
            busy_s=tuple(busy_s),
            waited_s=tuple(waited_s),
            peak_bytes=tuple(map(int, peaks)),
            grad_norm=self.worker.reduce_and_step.grad_norm,
        )

    def predict(self, cluster: Cluster | None = None) -> Timeline:
        """Simulate a step with the times that the ranks take alone. Every rank calls it, before training.

        cluster: its links are used; by default the link between ranks 0 and 1 is measured.
        """
        with self.calls.call("a prediction"):
            self._rehearsals = Rehearsals(self._forecast(), cluster)
            return self._rehearsals.first

    def rehearse(self) -> Timeline:
        """Simulate a step at the machine's pace of this moment; as `predict`, which it is the first time.

        Every rank calls it, between two steps. It takes about as long as one, and changes nothing."""
        if self._rehearsals is None:
            return self.predict()
        with self.calls.call("a rehearsal"):
            return self._rehearsals.again()

    def _forecast(self) -> Forecast:
        parts, plan = self.parts, self.parts.plan
        drawn = sample_batch(parts.job, 0, plan.microbatch_size)
        sample = {n: t.to(self.device) for n, t in drawn.items()}
        return Forecast(
            plan=plan,
            program=parts.train,
            variant=next(iter(parts.variants.values())),
            sample=sample,
            weights=self.weights,
            optimizer=parts.job.optimizer,
            rounds=self.options.accumulate,
            clips=self.options.clip_norm is not None,
            channel=self.channel,
            watch=self.watch,
            clock=self.recorder.clock,
            device=self.device,
            tier=self.tier,
        )

    def measured(self) -> Timeline:
        """The last step of all ranks. Every rank calls it.

        Times count from the start of the first rank where all share a machine and so a clock; otherwise
        from each rank's own start.
        """
        starts = self.channel.all_gather_object((platform.node(), self.recorder.started_s))
        one_machine = len({node for node, _ in starts}) == 1
        late_s = self.recorder.started_s - min(at for _, at in starts) if one_machine else 0.0
        curves = (self.recorder.curve(late_s), *self.recorder.host_curves(late_s))
        mine = (self.recorder.events(late_s), curves, self.ledger.at_peak)
        seen = self.channel.all_gather_object(mine)
        return Timeline(
            source="measured",
            ranks=self.ranks,
            events=tuple(e for events, _, _ in seen for e in events),
            memory=tuple(curve for _, curves, _ in seen for curve in curves),
            peaks=tuple(peak for _, _, peak in seen),
            pairs=tuple((str(first), str(second)) for first, second in self.parts.train.pairs),
        )

    def save(self, directory: Path, *, extra: Mapping[str, Any] | None = None, keep: int = 2) -> Path:
        """Write a checkpoint that any plan of this model can load. Every rank calls it.

        extra: JSON-able values to get back from `load`, such as the position in the data.
        """
        with self.calls.call("saving a checkpoint"):
            state = {"user": dict(extra or {}), "seed": self.options.seed}
            if self.scheduler is not None:
                state["scheduler"] = self.scheduler.state_dict()
            return checkpoint.save(
                directory, self._train_state(), step=self.steps, extra=state, group=self.group, keep=keep
            )

    def load(self, directory: Path) -> dict[str, Any]:
        """Continue from the newest checkpoint in `directory`; returns what `save` got as `extra`.

        Raises: CheckpointError on all ranks if there is none, it is damaged or of another model.
        """
        with self.calls.call("loading a checkpoint", heals=True):
            self.steps, state = checkpoint.load(directory, self._train_state(), group=self.group)
            if self.scheduler is not None and "scheduler" in state:
                self.scheduler.load_state_dict(state["scheduler"])
            self.ledger.set("optimizer", self.weights.sizes["optimizer"])
            return dict(state["user"])

    def _train_state(self) -> TrainState:
        graph = self.parts.captured.graph
        kept = {b.name for b in graph.buffers if b.persistent}
        optimizer = self.weights.optimizer
        return TrainState(
            parameters=self.weights.params,
            buffers={n: t for n, t in self.weights.buffers.items() if n in kept},
            optimizers=(optimizer,) if optimizer is not None else (),
            aliases={alias: p.name for p in graph.parameters for alias in p.aliases},
        )

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
