"""pipeloom bench: time some steps of a plan, without checkpoints and validation."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import median

from ..ir.errors import PeerError, PipeloomError
from ..ir.units import format_bytes
from ..pipeline import Pipeline
from ..plan_request import times_of
from ..planning import make_request, plan_size, simulate
from ..ranks import HandedModel, hand_over_model, take_over_model
from ..runnable import require_runnable, require_training
from ..runtime.launch.launch import StartedRanks, launch
from ..settings import PlanSettings
from ..step_reports import StepReport
from ..tracer.job import Job
from ..tracer.job_loader import load_job
from .config import Config
from .display import throughput
from .run import exit_rank, measuring
from .workload import default_job, tokens_of

FEWEST_STEPS = 6
"""A bench of fewer steps than this, those that warm up included, does not rehearse."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to time. model: names the job, None for the built-in GPT."""

    model: str | None
    settings: PlanSettings
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


def run_bench(bench: Bench, started: StartedRanks | None = None) -> int:
    """Plan, start the ranks, print; returns the exit status.

    started: processes for the ranks, if they were started already.
    Raises: PipeloomError for what is wrong before the ranks start.
    """
    require_runnable(bench.settings.schedule)
    job = bench.job()
    request = make_request(job, bench.settings)
    planned, model = plan_size(request, job)
    require_training(planned)
    sizes = {"microbatches": planned.microbatches, "microbatch_size": planned.microbatch_size}
    bench = replace(bench, settings=bench.settings.changed(**sizes))
    for sentence in [] if bench.as_json else times_of(planned):
        print(sentence)
    handed = hand_over_model(job, planned, captured=model.captured)
    profiled_s = simulate(planned, model.graph, model.profiles, request.cluster).step_s
    with tempfile.TemporaryDirectory(prefix="pipeloom-bench-") as folder:
        path = Path(folder) / "plan.json"
        planned.save(path)
        ranks, args = len(set(planned.placement)), (bench, path, handed, profiled_s)
        if started is not None and started.ranks == ranks:
            return started.run(_rank, args)
        return launch(_rank, ranks, args=args)


def _rank(bench: Bench, path: Path, model: HandedModel | None, profiled_s: float) -> None:
    try:
        require_runnable(bench.settings.schedule)  # which loads the operations of a user's own
        _time_steps(bench, path, model, profiled_s)
    except PeerError:
        raise  # the launcher knows that the cause is elsewhere
    except PipeloomError as error:
        exit_rank(error)


def _time_steps(bench: Bench, path: Path, model: HandedModel | None, profiled_s: float) -> None:
    job = bench.job()
    batch = job.batch(0, bench.settings.rows)
    options = measuring(bench.settings)
    with Pipeline(job, path, options=options, captured=take_over_model(model, job)) as pipeline:
        predicted_s = pipeline.predict().step_s if bench.rehearses else profiled_s
        reports = list(pipeline.steps(repeat(batch, bench.warmup + bench.steps)))
        rank, schedule = pipeline.rank, pipeline.plan.schedule
    if rank == 0:
        ran = bench.settings.changed(schedule=schedule)  # which the planner may have chosen
        _print(replace(bench, settings=ran), reports[bench.warmup :], tokens_of(job, batch), predicted_s)


def _print(bench: Bench, reports: list[StepReport], tokens: float | None, predicted_s: float) -> None:
    step_s = median(report.step_s for report in reports)
    rows_per_s = bench.settings.rows / step_s
    tokens_per_s = None if tokens is None else tokens / step_s
    bubble, peaks = median(report.bubble for report in reports), reports[-1].peak_bytes
    if bench.as_json:
        keys = ("ranks", "replicas", "schedule", "microbatches", "microbatch_size", "compile")
        figures = {
            "step_s": step_s,
            "rows_per_s": rows_per_s,
            "tokens_per_s": tokens_per_s,
            "bubble": bubble,
            "predicted_step_s": predicted_s,
            "predicted_by": "rehearsal" if bench.rehearses else "profile",
            "peak_bytes": list(peaks),
        }
        figures |= {key: getattr(bench.settings, key) for key in keys}
        print(json.dumps(figures | {"steps": bench.steps}, indent=1))
        return
    by = (
        "rehearsals of the ranks before it"
        if bench.rehearses
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
