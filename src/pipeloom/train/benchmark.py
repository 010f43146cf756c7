"""pipeloom bench: time some steps of a plan, without checkpoints and validation."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..api import Job, Pipeline, StepReport, launch, load_job, plan, require_runnable, require_training
from ..ir.errors import PeerError, PipeloomError
from ..ir.memory_policy import TREATMENTS
from ..ir.units import format_bytes
from .config import Config
from .run import exit_rank
from .workload import default_job


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to time; see the options of `pipeloom bench`."""

    model: str | None
    stages: int
    schedule: str
    microbatches: int
    microbatch_size: int
    split_backward: bool
    device_memory: str | None
    treat: str | None
    steps: int
    warmup: int
    as_json: bool

    def job(self) -> Job:
        return default_job(Config()) if self.model is None else load_job(self.model)


def run_bench(settings: BenchSettings) -> int:
    """Plan, start the ranks, print; returns the exit status.

    Raises: PipeloomError for what is wrong before the ranks start.
    """
    require_runnable(settings.schedule)
    planned = plan(
        settings.job(),
        stages=settings.stages,
        microbatches=settings.microbatches,
        microbatch_size=settings.microbatch_size,
        schedule=settings.schedule,
        split_backward=settings.split_backward,
        memory=settings.device_memory,
        treatments=None if settings.treat is None else TREATMENTS[settings.treat],
    )
    require_training(planned)
    with tempfile.TemporaryDirectory(prefix="pipeloom-bench-") as folder:
        path = Path(folder) / "plan.json"
        planned.save(path)
        return launch(_rank, len(set(planned.placement)), args=(settings, path))


def _rank(settings: BenchSettings, path: Path) -> None:
    try:
        require_runnable(settings.schedule)  # which loads the operations of a user's own
        _time_steps(settings, path)
    except PeerError:
        raise  # the launcher knows that the cause is elsewhere
    except PipeloomError as error:
        exit_rank(error)


def _time_steps(settings: BenchSettings, path: Path) -> None:
    job = settings.job()
    batch = job.batch(0, settings.microbatches * settings.microbatch_size)
    tokens = float(job.weight(batch)) if job.weight else float(len(next(iter(batch.values()))))
    reports: list[StepReport] = []
    with Pipeline(job, path) as pipeline:
        predicted = pipeline.predict()
        for _ in range(settings.warmup + settings.steps):
            pipeline.step(batch)
            assert pipeline.report is not None, "a step was just made"
            reports.append(pipeline.report)
        rank = pipeline.rank
    if rank == 0:
        _print(settings, reports[settings.warmup :], tokens, predicted.step_s)


def _print(settings: BenchSettings, reports: list[StepReport], tokens: float, predicted_s: float) -> None:
    step_s = median(report.step_s for report in reports)
    bubble, peaks = median(report.bubble for report in reports), reports[-1].peak_bytes
    if settings.as_json:
        keys = ("stages", "schedule", "microbatches", "microbatch_size", "steps")
        figures = {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "bubble": bubble,
            "predicted_step_s": predicted_s,
            "peak_bytes": list(peaks),
        }
        print(json.dumps(figures | {key: getattr(settings, key) for key in keys}, indent=1))
        return
    print(
        f"step        {step_s * 1e3:.1f} ms (median of {len(reports)}), predicted {predicted_s * 1e3:.1f} ms"
    )
    print(f"throughput  {tokens / step_s:,.0f} tokens/s")
    print(f"bubble      {bubble:.1%}")
    print(f"peak memory {' | '.join(map(format_bytes, peaks))}")
