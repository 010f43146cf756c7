"""pipeloom bench: time some steps of a plan, without checkpoints and validation."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import median

from ..ir.plan import Plan
from ..ir.text import format_bytes
from ..options import Options
from ..pipeline import Pipeline
from ..plan_request import times_of
from ..planning import make_request, plan_size, simulate
from ..runnable import require_runnable, require_training
from ..settings import PlanSettings
from ..step_reports import StepReport
from .config import Config
from .progress import throughput
from .rank_processes import HandedModel, RankProcesses, ranks_of, take_over
from .workload import job_of, tokens_of

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


def run_bench(bench: Bench, processes: RankProcesses) -> int:
    """Plan, run the ranks, print; returns the exit status.

    Raises: PipeloomError for what is wrong before the ranks run.
    """
    require_runnable(bench.settings.schedule)
    config = Config(job=bench.model)
    job = job_of(config)
    request = make_request(job, bench.settings)
    plan, model = plan_size(request, job)
    require_training(plan)
    sizes = {"microbatches": plan.microbatches, "microbatch_size": plan.microbatch_size}
    bench = replace(bench, settings=bench.settings.changed(**sizes))
    for sentence in [] if bench.as_json else times_of(plan):
        print(sentence)
    handed = processes.hand_over(config, job, plan, model.captured)
    profiled_s = simulate(plan, model.graph, model.profiles, request.cluster).step_s
    return processes.run(_time_steps, ranks_of(plan), bench, plan, handed, profiled_s)


def _time_steps(bench: Bench, plan: Plan, handed: HandedModel | None, profiled_s: float) -> None:
    """In each rank."""
    require_runnable(bench.settings.schedule)  # which loads the operations of a user's own
    job = job_of(Config(job=bench.model))
    batch = job.batch(0, bench.settings.rows)
    options = options_to_measure(bench.settings)
    with Pipeline(job, plan, options=options, captured=take_over(handed, job)) as pipeline:
        predicted_s = pipeline.predict().step_s if bench.rehearses else profiled_s
        reports = list(pipeline.steps(repeat(batch, bench.warmup + bench.steps)))
    if pipeline.rank == 0:
        ran = bench.settings.changed(schedule=plan.schedule)  # which the planner may have chosen
        _print(replace(bench, settings=ran), reports[bench.warmup :], tokens_of(job, batch), predicted_s)


def options_to_measure(settings: PlanSettings) -> Options:
    """Options of ranks that measure steps, and train nothing."""
    folder = None if settings.offload_dir is None else Path(settings.offload_dir)
    return Options(compare=False, offload_dir=folder, compile=settings.compile)


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
    by = "rehearsals of the ranks before it" if bench.rehearses else "the plan's profile: too few to rehearse"
    print(
        f"step        {step_s * 1e3:.1f} ms (median of {len(reports)}), "
        f"predicted {predicted_s * 1e3:.1f} ms by {by}"
    )
    rows = "" if tokens_per_s is None else f" ({throughput(rows_per_s, None)})"
    print(f"throughput  {throughput(rows_per_s, tokens_per_s)}{rows}")
    print(f"bubble      {bubble:.1%}")
    print(f"peak memory {' | '.join(map(format_bytes, peaks))}")
