"""Pipeline: a plan, running. One object per rank, one call per step."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import schedules
from .ir.errors import BatchError, CaptureError, PlanError
from .ir.plan import Plan, load_plan
from .ir.schedule import Program
from .ir.timeline import Timeline
from .lowering import lower
from .runtime import checkpoint
from .runtime.checkpoint_state import TrainState
from .runtime.connect import connect, watch_ranks
from .runtime.dist_channel import DistChannel
from .runtime.failure import Watch
from .runtime.ledger import Ledger
from .runtime.local_channel import LocalChannel, local_channels
from .runtime.posting import PostedChannel
from .runtime.recorder import CudaClock, HostClock, Recorder
from .runtime.weights import Weights, microbatch_rows
from .runtime.worker import Microbatch, Variant, Worker
from .tracer.capture import Captured, capture
from .tracer.functions import stage_functions
from .tracer.job import Job
from .tracer.random import microbatch_seed


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a pipeline runs.

    device: "cpu", or "cuda" for this rank's GPU.  seed: of the initial weights and of random ops.
    clip_norm: limit of the gradients' global norm.  scheduler: optimizer -> LR scheduler, stepped once a
    step.  autocast: dtype of mixed precision.  compiled: run stages through torch.compile.
    accumulate: rounds of the schedule per optimizer step; a batch is spread over all of them.
    timeout_s: limit of each wait.  keep_gradients: keep a copy of each step's gradients for inspection.
    """

    device: str = "cpu"
    seed: int = 0
    clip_norm: float | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    autocast: torch.dtype | None = None
    compiled: bool = False
    accumulate: int = 1
    timeout_s: float = 300.0
    keep_gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the last step was like, the same on every rank.

    step_s: seconds of the slowest rank.  busy_s, peak_bytes: per rank.  grad_norm: before clipping, None
    without clipping.
    """

    loss: float
    step_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    grad_norm: float | None = None

    @property
    def bubble(self) -> float:
        """Share of rank-time in which nothing was computed."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


@dataclass(eq=False)
class _Parts:
    """What a pipeline is made of, apart from its options."""

    job: Job
    plan: Plan
    captured: Captured
    train: Program
    evaluate: Program
    variants: dict[tuple[str, ...], Variant] = field(default_factory=dict)


class Pipeline:
    """Trains a job's model on the ranks of a plan. Every rank makes one and calls it with the same batch.

        with Pipeline(job, plan) as pipeline:
            for batch in batches:
                loss = pipeline.step(batch)

    Under torchrun or `pipeloom train` the ranks are processes; `group` may name an existing process group
    or a DeviceMesh with a dimension "pp". A plan for one rank needs neither.

    Raises: PlanError if the plan was made for another model or number of ranks; MemoryCapError if it
        needs more memory than its caps allow; ConfigError if the process is not one of several ranks.
    """

    def __init__(
        self, job: Job, plan: Plan | Path, *, options: Options | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None, channel: LocalChannel | None = None,
    ) -> None:  # fmt: skip
        self.options = options or Options()
        plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self.device = self._own_device()
        self.group: dist.ProcessGroup | None = None
        self.channel, self.watch = self._connect(plan, group, channel)
        self.rank, self.ranks = self.channel.rank, self.channel.ranks
        self.watch.__enter__()
        with self._telling_others():
            self._build(job, plan)

    def _build(self, job: Job, plan: Plan) -> None:
        if len(set(plan.placement)) != self.ranks:
            raise PlanError(
                f"the plan is for {len(set(plan.placement))} ranks, but {self.ranks} were started",
                hint="start as many ranks as the plan has, or plan again",
            )
        options = self.options
        captured = capture(job, plan.microbatch_size, autocast=options.autocast)
        stages = plan.stage_graph(captured.graph)
        forward = schedules.build("forward_only", stages, plan.placement, plan.microbatches)
        self.parts = _Parts(
            job=job, plan=plan, captured=captured,
            train=lower(plan.as_schedule, stages), evaluate=lower(forward, stages),
        )  # fmt: skip
        self.own_stages = tuple(s for s, rank in enumerate(plan.placement) if rank == self.rank)
        self.stages = stages
        self._variant(captured, _signature(job.batch(0, plan.microbatch_size)))
        cap = plan.caps[self.rank] if plan.caps else None
        self.ledger = Ledger(self.rank, cap)
        self.weights = self._own_weights(captured)
        for kind, size in self.weights.sizes.items():
            self.ledger.set(kind, size)
        clock = CudaClock() if self.device.type == "cuda" else HostClock()
        self.recorder = Recorder(self.rank, clock)
        self.worker = Worker(
            rank=self.rank, program=self.parts.train, weights=self.weights, channel=self.channel,
            ledger=self.ledger, recorder=self.recorder, watch=self.watch, clip_norm=options.clip_norm,
        )  # fmt: skip
        optimizer = self.weights.optimizer
        self.scheduler = options.scheduler(optimizer) if options.scheduler and optimizer else None
        self.steps = 0
        self.report: StepReport | None = None

    def _own_device(self) -> torch.device:
        if self.options.device == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.options.device)

    def _connect(
        self, plan: Plan, group: dist.ProcessGroup | DeviceMesh | None, channel: LocalChannel | None
    ) -> tuple[PostedChannel, Watch]:
        if channel is None and group is None and len(set(plan.placement)) == 1 and not dist.is_initialized():
            channel = local_channels(1, timeout_s=self.options.timeout_s)[0]
        if channel is not None:
            return channel, channel.watch
        self.group = connect(self.device, group=group, timeout_s=self.options.timeout_s)
        watch = watch_ranks(self.group)
        return DistChannel(self.group, watch, device=self.device, timeout_s=self.options.timeout_s), watch

    def _own_weights(self, captured: Captured) -> Weights:
        graph = captured.graph
        params = list(dict.fromkeys(n for s in self.own_stages for n in self.stages.params[s]))
        buffers = list(dict.fromkeys(n for s in self.own_stages for n in self.stages.buffers[s]))
        made = captured.blueprint.materialise(
            self.options.seed, [*params, *(b for b in buffers if b not in captured.constants)]
        )
        made |= {name: t for name, t in captured.constants.items() if name in buffers}
        return Weights(
            {n: nn.Parameter(made[n].to(self.device), graph.parameter[n].trainable) for n in params},
            {n: made[n].to(self.device) for n in buffers},
            self.parts.job.optimizer,
            keep_gradients=self.options.keep_gradients,
        )

    def _variant(self, captured: Captured, signature: tuple[str, ...]) -> Variant:
        stages = self.parts.plan.stage_graph(captured.graph)
        functions = {
            s: stage_functions(
                captured, stages, s, device=self.device.type, compiled=self.options.compiled
            )
            for s in self.own_stages
        }
        self.parts.variants[signature] = Variant(stages=stages, functions=functions)
        return self.parts.variants[signature]

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train on one batch: split it into micro-batches, run the schedule, update.

        batch: tensors whose first dimension is the batch; the same on every rank. Its rows are spread
            evenly over the micro-batches; another sequence length than before is captured anew.
        Returns: the loss, averaged over the batch, on every rank.
        Raises: BatchError on all ranks if the batch cannot be split or the ranks have different ones.
        """
        start = time.perf_counter()
        with self._telling_others():
            rounds = self._microbatches(batch, training=True)
            self.recorder.begin()
            losses = [
                self._round(microbatches, last=index == len(rounds) - 1)
                for index, microbatches in enumerate(rounds)
            ]
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
            self.report = self._share(sum(losses), time.perf_counter() - start)
        return self.report.loss

    def _round(self, microbatches: list[Microbatch], *, last: bool) -> float:
        losses = self.worker.run(microbatches, update=last)
        return sum(float(loss) * microbatches[m].weight for m, loss in losses.items())

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of one batch in evaluation mode, on every rank. Nothing is updated."""
        with self._telling_others():
            total = torch.zeros(1, dtype=torch.float64, device=self.device)
            for microbatches in self._microbatches(batch, training=False):
                losses = self.worker.run(microbatches, program=self.parts.evaluate, training=False)
                total += sum(float(loss) * microbatches[m].weight for m, loss in losses.items())
            self.channel.all_reduce(total)
        return float(total)

    def _microbatches(self, batch: Mapping[str, Tensor], *, training: bool) -> list[list[Microbatch]]:
        """Rounds of micro-batches, each with its share of the loss."""
        plan, job = self.parts.plan, self.parts.job
        rounds = self.options.accumulate if training else 1
        self._agree_on(_signature(batch))
        parts = _split(batch, plan.microbatches * rounds)
        weights = [float(job.weight(p)) if job.weight else float(_rows(p)) for p in parts]
        total = sum(weights)
        if total <= 0:
            raise BatchError("no token of this batch counts for the loss", hint="check Job.weight")
        made = [
            Microbatch(
                variant=self._variant_for(part),
                inputs={name: t.to(self.device) for name, t in part.items()},
                weight=weight / total,
                seed=microbatch_seed(self.options.seed, self.steps, index),
            )
            for index, (part, weight) in enumerate(zip(parts, weights, strict=True))
        ]
        self.ledger.set("batch", sum(t.nbytes for t in batch.values()))
        return [made[i : i + plan.microbatches] for i in range(0, len(made), plan.microbatches)]

    def _variant_for(self, part: Mapping[str, Tensor]) -> Variant:
        signature = _signature(part)
        if signature not in self.parts.variants:
            known, parts = next(iter(self.parts.variants)), self.parts
            try:
                captured = capture(
                    parts.job, _rows(part), batch=part, autocast=self.options.autocast,
                    made=parts.captured.blueprint,
                )  # fmt: skip
                return self._variant(captured, signature)
            except (CaptureError, PlanError) as error:
                raise BatchError(
                    f"a micro-batch of {', '.join(signature)} does not fit the plan, which was made for "
                    f"{', '.join(known)}: {error.message}",
                    hint="pad or cut the batch to the planned size, or plan for this one",
                ) from None
        return self.parts.variants[signature]

    def _agree_on(self, signature: tuple[str, ...]) -> None:
        """All ranks must have a batch of the same shapes, or transfers would not match."""
        own = float(zlib.crc32(repr(signature).encode()))
        total = torch.tensor([own, own * own], dtype=torch.float64, device=self.device)
        self.channel.all_reduce(total)
        if total.tolist() != [self.ranks * own, self.ranks * own * own]:
            seen = self.channel.all_gather_object(signature)
            table = "; ".join(f"rank {r}: {', '.join(s)}" for r, s in enumerate(seen))
            raise BatchError(
                f"the ranks have different batches: {table}", hint="give all ranks the same batch"
            )

    def _share(self, loss: float, step_s: float) -> StepReport:
        """Make one rank's figures known to all."""
        table = torch.zeros(self.ranks, 3, dtype=torch.float64)
        busy = sum(e.duration_s for e in self.recorder.events() if e.stream == "compute")
        table[self.rank] = torch.tensor([step_s, busy, self.ledger.peak])
        both = torch.cat([table.flatten(), torch.tensor([loss], dtype=torch.float64)]).to(self.device)
        self.channel.all_reduce(both)
        table = both[:-1].reshape(self.ranks, 3).cpu()
        return StepReport(
            loss=float(both[-1]), step_s=float(table[:, 0].max()), busy_s=tuple(table[:, 1].tolist()),
            peak_bytes=tuple(int(p) for p in table[:, 2].tolist()), grad_norm=self.worker.grad_norm,
        )  # fmt: skip

    def measured(self) -> Timeline:
        """The last step of all ranks. Every rank calls it."""
        mine = (self.recorder.events(), self.recorder.curve(), self.ledger.at_peak)
        seen = self.channel.all_gather_object(mine)
        return Timeline(
            source="measured", ranks=self.ranks, events=tuple(e for events, _, _ in seen for e in events),
            memory=tuple(curve for _, curve, _ in seen), peaks=tuple(peak for _, _, peak in seen),
        )  # fmt: skip

    def save(self, directory: Path, *, extra: Mapping[str, Any] | None = None, keep: int = 2) -> Path:
        """Write a checkpoint that any plan of this model can load. Every rank calls it.

        extra: JSON-able values to get back from `load`, such as the position in the data.
        """
        with self._telling_others():
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
        with self._telling_others():
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
        self.watch.__exit__(None, None, None)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.__exit__(kind, error, trace)

    def _telling_others(self) -> _Telling:
        return _Telling(self.watch)


class _Telling:
    """An exception inside tells the other ranks before it goes on."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __enter__(self) -> None:
        self.watch.check()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.watch.fail(error)


def _rows(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _signature(batch: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(f"{n}{list(t.shape)}{str(t.dtype).removeprefix('torch.')}" for n, t in batch.items())


def _split(batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Micro-batches of nearly equal size. Raises: BatchError if there are fewer rows than parts."""
    rows = {name: len(t) if t.ndim else 0 for name, t in batch.items()}
    if len(set(rows.values())) != 1:
        found = ", ".join(f"{n} {c}" for n, c in rows.items())
        raise BatchError(
            f"the batch's tensors have different numbers of rows: {found}",
            hint="the first dimension of every tensor is the batch",
        )
    count = next(iter(rows.values()))
    if count < parts:
        raise BatchError(
            f"a batch of {count} rows cannot be split into {parts} micro-batches",
            hint=f"give at least {parts} rows, or plan with fewer micro-batches",
        )
    sizes = microbatch_rows(count, parts)
    split = {name: torch.split(t, list(sizes)) for name, t in batch.items()}
    return [{name: pieces[i] for name, pieces in split.items()} for i in range(parts)]
