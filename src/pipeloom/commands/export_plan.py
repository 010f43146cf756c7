"""pipeloom export-plan: a plan for another engine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..ir.text import write_whole
from ..other_engines import ENGINES
from .common import FILE, MODEL_HELP, NEW_FILE, OneOf, job_of, model_argument, not_the_built_in


@click.command("export-plan", epilog=MODEL_HELP)
@click.argument("plan_file", metavar="PLAN", type=FILE)
@model_argument
@click.option("--for", "engine", type=OneOf(tuple(ENGINES)), required=True, help="Whose plan it becomes.")
@click.option("--csv", "csv_file", type=NEW_FILE, help="Write the order of the actions to this file.")
def export_plan(*, plan_file: Path, model: str | None, engine: str, csv_file: Path | None) -> None:
    """Print PLAN, made for MODEL, as the settings of another engine.

    torch and torchtitan: one JSON object. megatron: options for its command line. Stages must be of whole
    modules, as `pipeloom plan --granularity module` makes them. What is left out is said on standard error.
    """
    from .. import planning
    from ..ir.plan import load_plan
    from ..other_engines import export_for
    from ..schedules.formats import schedule_text

    plan = load_plan(plan_file)
    graph = planning.capture(job_of(model), plan.microbatch_size, split=plan.split_words).graph
    if model is None and graph.fingerprint != plan.graph:
        raise not_the_built_in(plan_file)
    made = export_for(plan, graph, engine, csv_file)
    if csv_file is not None and made.order is not None:
        write_whole(csv_file, schedule_text(made.order))
    for note in made.notes:
        click.echo(note, err=True)
    click.echo(made.flags if engine == "megatron" else json.dumps(made.settings, indent=1))
