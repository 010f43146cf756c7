"""pipeloom bench: steps per second of a plan on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import click

from .common import MODEL_HELP, emit, job_of, json_option, model_argument, plan_options, settings_of

FEWEST_STEPS = 6
"""A bench of fewer steps, those that warm up included, does not rehearse."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """How fast a plan runs. step_s and bubble: medians.  tokens_per_s: None if the data are no tokens.
    predicted_by: "rehearsal" or "profile".  peak_bytes: per rank."""

    step_s: float
    rows_per_s: float
    tokens_per_s: float | None
    bubble: float
    predicted_step_s: float
    predicted_by: str
    peak_bytes: tuple[int, ...]
    ranks: int
    replicas: int
    schedule: str
    microbatches: int
    microbatch_size: int
    compile: bool
    steps: int


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options(without=("cluster",))
@click.option("--steps", type=click.IntRange(1), default=10, help="Steps to time.")
@click.option("--warmup", type=click.IntRange(0), default=2, help="Steps before them.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    *,
    model: str | None,
    steps: int,
    warmup: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan MODEL, run some steps with a process for each rank, and print the speed.

    Before the steps the ranks rehearse to predict one, which takes as long as a step or two; where fewer than
    6 steps are asked for, --warmup included, the prediction is that of the plan's profile instead.
    """
    settings = settings_of(options)
    job = job_of(model) if model is not None else None  # a missing file is said before torch is loaded
    from ..train.config import Config
    from ..train.rank_processes import RankProcesses

    with RankProcesses(settings.devices, Config(job=model)) as processes:
        from .. import plan_request, planning  # torch is loaded here, while the ranks load it, too
        from ..runnable import require_runnable, require_training
        from ..train.measured_steps import measure_steps
        from ..train.workload import tokens_of

        require_runnable(settings.schedule)
        job = job or job_of(None)
        request = planning.make_request(job, settings)
        plan, planned = planning.plan_size(request, job)
        require_training(plan)
        rehearses = warmup + steps >= FEWEST_STEPS
        how: dict[str, Any] = {"model": model, "planned": planned, "steps": warmup + steps}
        measured = measure_steps(settings, plan, job, processes, rehearses=rehearses, **how)
        if isinstance(measured, int):
            ctx.exit(measured)
    profiled_s = planning.simulate(plan, planned.graph, planned.profiles, request.cluster).step_s
    reports, rows = measured.reports[warmup:], plan.microbatches * plan.microbatch_size
    tokens = tokens_of(job, job.batch(0, rows))
    step_s = median(report.step_s for report in reports)
    report = BenchReport(
        step_s=step_s,
        rows_per_s=rows / step_s,
        tokens_per_s=None if tokens is None else tokens / step_s,
        bubble=median(report.bubble for report in reports),
        predicted_step_s=profiled_s if measured.rehearsed_s is None else measured.rehearsed_s,
        predicted_by="rehearsal" if rehearses else "profile",
        peak_bytes=reports[-1].peak_bytes,
        schedule=plan.schedule,  # which the planner may have chosen
        microbatches=plan.microbatches,
        microbatch_size=plan.microbatch_size,
        steps=steps,
        **{key: getattr(settings, key) for key in ("ranks", "replicas", "compile")},
    )
    emit(report, _screen(report, plan_request.times_of(plan)), as_json=as_json)


def _screen(report: BenchReport, about: list[str]) -> Iterator[str]:
    from ..ir.text import format_bytes
    from ..train.progress import throughput

    yield from about
    rehearsed = report.predicted_by == "rehearsal"
    by = "rehearsals of the ranks before it" if rehearsed else "the plan's profile: too few to rehearse"
    yield (
        f"step        {report.step_s * 1e3:.1f} ms (median of {report.steps}), "
        f"predicted {report.predicted_step_s * 1e3:.1f} ms by {by}"
    )
    rows = "" if report.tokens_per_s is None else f" ({throughput(report.rows_per_s, None)})"
    yield f"throughput  {throughput(report.rows_per_s, report.tokens_per_s)}{rows}"
    yield f"bubble      {report.bubble:.1%}"
    yield f"peak memory {' | '.join(map(format_bytes, report.peak_bytes))}"
