"""What one rank of a pipeline is made of: its stages, its weights, and the worker that runs its row."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.errors import PlanError
from ..ir.plan import Plan, load_plan
from ..ir.units import format_bytes
from ..lowering.passes import lower
from ..runtime.allocator import give_back_freed_memory, keep_freed_memory
from ..runtime.ledger import Ledger
from ..runtime.offload.open_tier import open_tier
from ..runtime.offload.tier import Tier
from ..runtime.out_of_memory import out_of_memory_told
from ..runtime.recorder import CudaClock, HostClock, Recorder
from ..runtime.transports.local_channel import LocalChannel
from ..runtime.worker import Worker
from ..tracer.capture import capture
from ..tracer.captured import Captured
from ..tracer.job import Job
from ..tracer.job_calls import sample_batch
from .forecast import Forecast
from .options import Options
from .pipeline_checkpoint import PipelineCheckpoint
from .rank_stages import EvaluationVariants, RankStages, TrainingVariants
from .ranks import join_ranks, rank_device
from .rate_schedulers import make_scheduler
from .runnable import refuse_torn_updates, require_runnable_plan
from .steady_run import open_steady_run
from .step_batches import StepBatches
from .step_reports import StepRecord


class PipelineParts:
    """Makes what `Pipeline` works with, in three steps: a rank joins the others, cuts its model, and makes
    its weights and its worker."""

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
