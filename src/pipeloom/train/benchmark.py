"""pipeloom bench: time some steps of a plan, without checkpoints and validation."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import median

from ..ir.errors import PeerError, PipeloomError
from ..ir.memory_policy import TREATMENTS
from ..ir.units import format_bytes
from ..options import Options
from ..passes import simulate
from ..pipeline import Pipeline
from ..plan_request import times_of
from ..planning import make_request, plan_size
from ..ranks import HandedModel, hand_over_model, take_over_model
from ..runnable import require_runnable, require_training
from ..runtime.launch.launch import StartedRanks, launch
from ..step_reports import StepReport
from ..tracer.job import Job
from ..tracer.job_loader import load_job
from .config import Config
from .display import throughput
from .run import exit_rank
from .workload import default_job, tokens_of

FEWEST_STEPS = 6
"""A bench of fewer steps than this, those that warm up included, does not rehearse."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to time; see the options of `pipeloom bench`."""

    model: str | None
    stages: int
    width: int
    schedule: str
    chunks: int | None
    planner: str
    microbatches: int
    microbatch_size: int
    split_backward: bool
    shard_optimizer: bool
    weights: str | None
    device_memory: str | None
    treat: str | None
    compiled: bool = False
    offload_dir: Path | None = None
    steps: int
    warmup: int
    as_json: bool

    @property
    def rehearses(self) -> bool:
        """Whether the ranks rehearse their rows to predict a step, which takes them about as long as a step
        or two: not where hardly more are asked for. The prediction is then that of the plan's profile."""
        return self.warmup + self.steps >= FEWEST_STEPS

    def job(self) -> Job:
        return default_job(Config()) if self.model is None else load_job(self.model)


def run_bench(settings: BenchSettings, started: StartedRanks | None = None) -> int:
    """Plan, start the ranks, print; returns the exit status.

    started: processes for the ranks, if they were started already.
    Raises: PipeloomError for what is wrong before the ranks start.
    """
    require_runnable(settings.schedule)
    job = settings.job()
    request = make_request(
        job,
        stages=settings.stages,
        width=settings.width,
        microbatches=settings.microbatches,
        schedule=settings.schedule,
        chunks=settings.chunks,
        strategy=settings.planner,
        split_backward=settings.split_backward,
        shard_optimizer=settings.shard_optimizer,
        memory=settings.device_memory,
        treatments=None if settings.treat is None else TREATMENTS[settings.treat],
        weights=settings.weights,
        offload_dir=settings.offload_dir,
        compiled=settings.compiled,
    )
    planned, model = plan_size(request, job, settings.microbatch_size)
    require_training(planned)
    for sentence in [] if settings.as_json else times_of(planned):
        print(sentence)
    handed = hand_over_model(job, planned, captured=model.captured)
    profiled_s = simulate(planned, model.graph, model.profiles, request.cluster).step_s
    with tempfile.TemporaryDirectory(prefix="pipeloom-bench-") as folder:
        path = Path(folder) / "plan.json"
        planned.save(path)
        ranks, args = len(set(planned.placement)), (settings, path, handed, profiled_s)
        if started is not None and started.ranks == ranks:
            return started.run(_rank, args)
        return launch(_rank, ranks, args=args)


def _rank(settings: BenchSettings, path: Path, model: HandedModel | None, profiled_s: float) -> None:
    try:
        require_runnable(settings.schedule)  # which loads the operations of a user's own
        _time_steps(settings, path, model, profiled_s)
    except PeerError:
        raise  # the launcher knows that the cause is elsewhere
    except PipeloomError as error:
        exit_rank(error)


def _time_steps(settings: BenchSettings, path: Path, model: HandedModel | None, profiled_s: float) -> None:
    job = settings.job()
    batch = job.batch(0, settings.microbatches * settings.microbatch_size)
    # It times steps, and trains nothing.
    options = Options(compare=False, offload_dir=settings.offload_dir, compiled=settings.compiled)
    with Pipeline(job, path, options=options, captured=take_over_model(model, job)) as pipeline:
        predicted_s = pipeline.predict().step_s if settings.rehearses else profiled_s
        reports = list(pipeline.steps(repeat(batch, settings.warmup + settings.steps)))
        rank, schedule = pipeline.rank, pipeline.plan.schedule
    if rank == 0:
        ran = replace(settings, schedule=schedule)  # which the planner may have chosen
        _print(ran, reports[settings.warmup :], tokens_of(job, batch), predicted_s)


def _print(
    settings: BenchSettings, reports: list[StepReport], tokens: float | None, predicted_s: float
) -> None:
    step_s = median(report.step_s for report in reports)
    rows_per_s = settings.microbatches * settings.microbatch_size / step_s
    tokens_per_s = None if tokens is None else tokens / step_s
    bubble, peaks = median(report.bubble for report in reports), reports[-1].peak_bytes
    if settings.as_json:
        keys = ("stages", "width", "schedule", "microbatches", "microbatch_size", "compiled", "steps")
        figures = {
            "step_s": step_s,
            "rows_per_s": rows_per_s,
            "tokens_per_s": tokens_per_s,
            "bubble": bubble,
            "predicted_step_s": predicted_s,
            "predicted_by": "rehearsal" if settings.rehearses else "profile",
            "peak_bytes": list(peaks),
        }
        print(json.dumps(figures | {key: getattr(settings, key) for key in keys}, indent=1))
        return
    by = (
        "rehearsals of the ranks before it"
        if settings.rehearses
        else "the plan's profile: for so few steps ranks rehearse none"
    )
    print(
        f"step        {step_s * 1e3:.1f} ms (median of {len(reports)}), "
        f"predicted {predicted_s * 1e3:.1f} ms by {by}"
    )
    rows = "" if tokens_per_s is None else f" ({throughput(rows_per_s, None)})"
    print(f"throughput  {throughput(rows_per_s, tokens_per_s)}{rows}")
    print(f"bubble      {bubble:.1%}")
    print(f"peak memory {' | '.join(map(format_bytes, peaks))}")
