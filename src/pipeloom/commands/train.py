"""pipeloom train: the main job."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click

from .common import FILE, Size, chunks_option, json_option, planner_option, treat_option, weights_option


@click.command()
@click.argument("config", type=FILE, required=False)
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
    help="Train your own model: file.py:function or package.module:function returning a pipeloom.Job.",
)
@click.option(
    "--stages",
    "-p",
    type=click.IntRange(1),
    help="Ranks of a pipeline. A schedule puts one stage on each, or several: see --chunks.",
)
@click.option(
    "--width",
    type=click.IntRange(1),
    help="Pipelines side by side: replicas of every stage, each in a process of its own.",
)
@click.option(
    "--shard-optimizer/--no-shard-optimizer",
    default=None,
    help="Replicas share out the optimizer's state, as ZeRO-1 does.",
)
@click.option("--schedule", "-s", help="Schedule, by name.")
@chunks_option
@weights_option
@planner_option(None)
@click.option("--steps", type=click.IntRange(1), help="Train until this step.")
@click.option("--device-memory", type=Size(), help="Cap per rank, as 300MiB: what does not fit is refused.")
@treat_option
@click.option(
    "--offload-dir",
    type=click.Path(file_okay=False),
    help="Folder on a disk for residuals that do not fit in --device-memory, or that a plan file offloads.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run directory, instead of runs/<name>-<n>.",
)
@click.option(
    "--resume", is_flag=True, help="Go on with the newest run of this name, or with the one in --out."
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
    out: Path | None,
    resume: bool,
    as_json: bool,
    **settings: object,
) -> None:
    """Train a model in several processes, and report.

    CONFIG is a TOML file; without one, a byte-level GPT trains on the Python standard library in two
    processes. The run directory gets config.toml, plan.json, metrics.jsonl, checkpoint/, trace.json,
    report.html and summary.json. Under torchrun each process is one rank.

    With --json, what summary.json holds: run, name, steps, first_step (steps done before this start), stages,
    width, schedule, microbatches, train_loss and validation_loss (first and last); forecast, predicted and
    measured (step_s, bubble, peak_bytes and residual_peak_bytes per rank): the forecast is made before the
    first step, predicted and measured belong to one rehearsal and the step it is held against, those of
    middle error, but for measured bytes, the most since the run began; middle_step_s (median of the steps
    since this start, without those that warm up), forecast_error (of the forecast, against that), step_error
    (predicted less measured, as a share of measured), step_error_quartiles (of all rehearsals), rehearsals
    (of each: step, predicted_step_s, measured_step_s, and steps, of which the measured one is the middle).
    """
    from ..train.config_text import read_config
    from ..train.early_ranks import ranks_for

    changes = (*_as_overrides(settings), *overrides)
    asked = read_config(config, changes)
    with nullcontext() if resume else ranks_for(asked) as started:
        from ..train.run import TrainRequest, run  # all of torch is loaded here, while the ranks load it, too

        request = TrainRequest(file=config, overrides=changes, out=out, resume=resume, as_json=as_json)
        status = run(request, started)
    ctx.exit(status)


KEYS = {
    "data": "data.paths",
    "job": "job",
    "stages": "pipeline.stages",
    "width": "pipeline.width",
    "shard_optimizer": "pipeline.shard_optimizer",
    "schedule": "pipeline.schedule",
    "chunks": "pipeline.chunks",
    "weights": "pipeline.weights",
    "planner": "pipeline.planner",
    "steps": "steps",
    "device_memory": "pipeline.device_memory",
    "treat": "pipeline.treat",
    "offload_dir": "pipeline.offload_dir",
    "compare": "compare",
}
"""Options that are short forms of a setting."""


def _as_overrides(settings: dict[str, object]) -> list[str]:
    """
    >>> _as_overrides({"stages": 3, "data": ("a b", "c"), "job": None})
    ['pipeline.stages=3', 'data.paths=["a b", "c"]']
    """
    import json

    pairs = []
    for option, value in settings.items():
        if isinstance(value, bool):
            pairs.append(f"{KEYS[option]}={json.dumps(value)}")
        elif isinstance(value, tuple):
            pairs += [f"{KEYS[option]}={json.dumps(value)}"] if value else []
        elif isinstance(value, bool):
            pairs.append(f"{KEYS[option]}={str(value).lower()}")
        elif value is not None:
            pairs.append(f"{KEYS[option]}={value}")
    return pairs
