"""pipeloom train: the main job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..train.config import OPTIMIZERS, PipelineConfig
from .common import FILE, OneOf, exclusive, json_option, plan_options


def names_model(given: Path) -> bool:
    """Whether it is a model, and not a file of settings.

    >>> [names_model(Path(given)) for given in ("mine.py:job", "mine.py", "runs/gpt-1/config.toml")]
    [True, True, False]
    """
    return given.suffix == ".py" or (":" in given.name and not given.exists())


@click.command()
@click.argument("config", metavar="[MODEL | CONFIG]", type=FILE, required=False)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one setting, as in --set model.width=256. May be repeated.",
)
@click.option(
    "--data",
    "data",
    multiple=True,
    metavar="PATH",
    help="Train on this text file, or on all files of this folder. May be repeated.",
)
@click.option(
    "--job",
    metavar="MODEL",
    help="The MODEL, where CONFIG is given, too.",
)
@plan_options(of=PipelineConfig, unset=True, without=("clips",))
@click.option(
    "--optimizer",
    type=OneOf(OPTIMIZERS),
    help="What trains: muon+adamw is Muon for the matrices of layers and AdamW for the rest. A job may bring "
    "its own instead.",
)
@click.option("--steps", type=click.IntRange(1), help="Train until this step.")
@click.option(
    "--replan",
    type=click.IntRange(0),
    help="After every so many steps plan again if ranks are slower than planned, and go on with that plan if "
    "it gains more than it costs.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run directory, instead of runs/<name>-<n>.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the newest run of this name that has a checkpoint, or with the one in --out.",
)
@click.option(
    "--compare/--no-compare",
    default=None,
    help="Compare a model that was not trained here before with plain PyTorch first (default).",
)
@json_option
@click.pass_context
def train(
    ctx: click.Context,
    /,
    *,
    config: Path | None,
    overrides: tuple[str, ...],
    data: tuple[str, ...],
    job: str | None,
    optimizer: str | None,
    steps: int | None,
    replan: int | None,
    compare: bool | None,
    out: Path | None,
    resume: bool,
    as_json: bool,
    **pipeline: Any,
) -> None:
    """Train a model in several processes, and report.

    MODEL is file.py:function or package.module:function returning a pipeloom.Job; CONFIG is a TOML file.
    Without either, a byte-level GPT trains on the Python standard library in two processes. The run directory
    gets config.toml, plan.json, metrics.jsonl, checkpoint/, trace.json, timelines.json, report.html and
    summary.json. Under torchrun each process is one rank.

    With --json, what summary.json holds: run, name, steps, first_step (steps done before this start), stages,
    replicas, schedule, microbatches, train_loss and validation_loss (first and last); forecast and measured
    (step_s, bubble, peak_bytes and residual_peak_bytes per rank): a step as predicted before the first one,
    and the middle one of the last five (without a flush, the last three in a row), but for measured bytes,
    the most since the run began; middle_step_s (median of the steps since this start or its last change of
    plan, without those that warm up), forecast_error (predicted less that, as a share of it).
    """
    if config is not None and names_model(config):
        exclusive("config", "job", hint="name one model")
        config, job = None, str(config)
    from ..ir.plan import load_plan
    from ..train.config import Override, read_config
    from ..train.rank_processes import RankProcesses

    given: dict[str, Any] = {"data.paths": data or None, "job": job, "steps": steps, "compare": compare}
    given |= {"replan": replan, "optimizer.name": optimizer}
    given |= {f"pipeline.{name}": value for name, value in pipeline.items()}
    changes: tuple[Override, ...] = (
        *((key, value) for key, value in given.items() if value is not None),
        *overrides,
    )
    asked = read_config(config, changes)
    planned = resume or "RANK" in os.environ  # by whom the plan's file may be read is not known yet
    ranks, plan = asked.pipeline.devices, asked.pipeline.plan
    if not planned and plan is not None:
        ranks = load_plan(Path(plan)).ranks
    with RankProcesses(0 if planned else ranks, asked) as processes:
        from ..train.run import TrainRequest, run  # all of torch is loaded here, while the ranks load it, too

        request = TrainRequest(file=config, overrides=changes, out=out, resume=resume, as_json=as_json)
        status = run(request, processes)
    ctx.exit(status)
