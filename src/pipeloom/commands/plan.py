"""pipeloom plan: cut a model into stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..ir.errors import ConfigError
from .common import (
    FILE,
    MODEL_HELP,
    Size,
    cluster_of,
    cluster_option,
    console,
    job_of,
    json_option,
    model_argument,
    plan_options,
    print_json,
)


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options
@click.option("--device-memory", type=Size(), help="Cap per rank, as 300MiB.")
@cluster_option("Plan for these devices, by roofline.")
@click.option("--profile", "profile_file", type=FILE, help="Use this saved profile instead of measuring.")
@click.option("--strategy", default="exact", show_default=True, help="Planner, by name.")
@click.option("--output", "-o", type=FILE, help="Write the plan to this JSON file.")
@json_option
def plan(
    *, model: str | None, device_memory: str | None, cluster: str | None, profile_file: Path | None,
    output: Path | None, as_json: bool, **wanted: Any,
) -> None:  # fmt: skip
    """Cut MODEL into stages and print what each runs, takes and holds.

    With --json: predicted_step_s, planner, schedule, microbatches, microbatch_size, graph, and stages: a
    list of stage, rank, ops, first_op, last_op, forward_s, input_grad_s, weight_grad_s, bytes by kind,
    peak_bytes, cap_bytes, filled.
    """
    from ..api import passes
    from ..ir import codec
    from ..ir.profile import Profile
    from ..planner import explain

    if device_memory is not None and cluster is not None:
        raise ConfigError(
            "--device-memory and --cluster were both given",
            hint="say each device's memory in the cluster, as in --cluster '4 x a100-40 with 20GiB'",
        )
    found = passes.plan(
        job_of(model), memory=device_memory, cluster=cluster_of(cluster),
        profiled=None if profile_file is None else codec.load(profile_file, Profile), **wanted,
    )  # fmt: skip
    if output is not None:
        found.save(output)
    rows = explain(found)
    if as_json:
        keys = ("predicted_step_s", "planner", "schedule", "microbatches", "microbatch_size", "graph")
        print_json({**{key: getattr(found, key) for key in keys}, "stages": rows})
    else:
        _print(rows, found.predicted_step_s)


def _print(rows: list[dict[str, Any]], step_s: float) -> None:
    from rich import box
    from rich.table import Table

    from ..ir.units import format_bytes

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    heads = ("stage", "rank", "ops", "forward ms", "backward ms", "parameters", "residuals", "peak", "cap")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        backward_s = row["input_grad_s"] + row["weight_grad_s"]
        cap = row["cap_bytes"]
        table.add_row(
            str(row["stage"]), str(row["rank"]), str(row["ops"]), f"{row['forward_s'] * 1e3:.2f}",
            f"{backward_s * 1e3:.2f}", format_bytes(row["parameters_bytes"]),
            format_bytes(row["residuals_bytes"]), format_bytes(row["peak_bytes"]),
            "–" if cap is None else format_bytes(cap),
        )  # fmt: skip
    out = console()
    out.print(table)
    out.print(f"predicted step: {step_s * 1e3:.1f} ms", highlight=False)
