"""pipeloom bench: steps per second of a plan on this machine."""

from __future__ import annotations

from typing import Any

import click

from .common import MODEL_HELP, job_of, json_option, model_argument, plan_options, settings_of


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

    With --json: step_s (median), rows_per_s, tokens_per_s (null where the data are no tokens), bubble,
    predicted_step_s, predicted_by ("rehearsal" or "profile"), peak_bytes (per rank), ranks, replicas,
    schedule, microbatches, microbatch_size, compile, steps.
    """
    settings = settings_of(options)
    if model is not None:
        job_of(model)  # a file that is missing is said before all of torch is loaded
    from ..train.config import Config
    from ..train.rank_processes import RankProcesses

    with RankProcesses(settings.devices, Config(job=model)) as processes:
        from ..train.benchmark import Bench, run_bench  # torch is loaded here, while the ranks load it, too

        bench = Bench(model=model, settings=settings, steps=steps, warmup=warmup, as_json=as_json)
        status = run_bench(bench, processes)
    ctx.exit(status)
