"""pipeloom bench: steps per second of a plan on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import click

from ..ir.text import format_bytes
from ..plan_settings import ROWS_OR_COUNT
from .common import (
    MODEL_HELP,
    emit,
    exclusive,
    job_of,
    json_option,
    model_argument,
    plan_options,
    settings_of,
)

FEWEST_STEPS = 6
"""A bench of fewer steps, those that warm up included, does not rehearse."""


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options(without=("cluster", "lengths"))
@click.option("--steps", type=click.IntRange(1), default=10, help="Steps to time.")
@click.option("--warmup", type=click.IntRange(0), default=2, help="Steps before them.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context, /, *, model: str | None, steps: int, warmup: int, as_json: bool, **options: Any
) -> None:
    """Plan MODEL, run some steps with a process for each rank, and print the speed.

    Before the steps the ranks rehearse to predict one, which takes as long as a step or two; where fewer than
    6 steps are asked for, --warmup included, the prediction is that of the plan's profile instead.
    """
    exclusive("microbatches", "global_batch", hint=ROWS_OR_COUNT)
    settings = settings_of(options)
    job = job_of(model) if model is not None else None  # a missing file is said before torch is loaded
    from ..train.config import Config
    from ..train.rank_processes import RankProcesses

    with RankProcesses(settings.devices, Config(job=model)) as processes:
        from .. import plan_request, planning  # torch is loaded here, while the ranks load it, too
        from ..runnable import require_runnable, require_training
        from ..train.measured_steps import measure_steps
        from ..train.workload import tokens_of

        require_runnable(settings.named_schedule)
        job = job or job_of(None)
        request = planning.make_request(settings)
        plan, planned = planning.plan_size(request, job)
        require_training(plan)
        rehearses = warmup + steps >= FEWEST_STEPS
        how: dict[str, Any] = {"model": model, "planned": planned, "steps": warmup + steps}
        measured = measure_steps(settings, plan, job, processes, rehearses=rehearses, **how)
        if isinstance(measured, int):
            ctx.exit(measured)
    profiled_s = planning.simulate(plan, planned.graph, planned.profiles, request.cluster).step_s
    predicted_s = profiled_s if measured.rehearsed_s is None else measured.rehearsed_s
    reports, rows = measured.reports[warmup:], plan.microbatches * plan.microbatch_size
    tokens = tokens_of(job, job.batch(0, rows))
    step_s, bubble = (median(getattr(each, key) for each in reports) for key in ("step_s", "bubble"))
    rows_per_s, tokens_per_s = rows / step_s, None if tokens is None else tokens / step_s

    def screen() -> Iterator[str]:
        from ..train.progress import throughput

        yield from plan_request.times_of(plan)
        by = "rehearsals of the ranks before it" if rehearses else "the plan's profile: too few to rehearse"
        yield (
            f"step        {step_s * 1e3:.1f} ms (median of {steps}), "
            f"predicted {predicted_s * 1e3:.1f} ms by {by}"
        )
        beside = "" if tokens_per_s is None else f" ({throughput(rows_per_s, None)})"
        yield f"throughput  {throughput(rows_per_s, tokens_per_s)}{beside}"
        yield f"bubble      {bubble:.1%}"
        yield f"peak memory {' | '.join(map(format_bytes, reports[-1].peak_bytes))}"

    result = {
        "step_s": step_s,
        "rows_per_s": rows_per_s,
        "tokens_per_s": tokens_per_s,  # None if the data are no tokens
        "bubble": bubble,
        "predicted_step_s": predicted_s,
        "predicted_by": "rehearsal" if rehearses else "profile",
        "peak_bytes": reports[-1].peak_bytes,
        "ranks": plan.ranks // plan.width,
        "replicas": plan.width,
        "schedule": plan.schedule,  # which the planner may have chosen
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "compile": settings.compile,
        "steps": steps,
    }
    emit(result, screen(), as_json=as_json)
