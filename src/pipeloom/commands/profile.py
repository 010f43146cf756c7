"""pipeloom profile: what each op of a model costs."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import click

from ..ir.text import save_noun, show_share
from ..viewer.table import Column, Table
from .common import (
    MODEL_HELP,
    NEW_FILE,
    OneOf,
    cluster_of,
    emit,
    exclusive,
    job_of,
    json_option,
    model_argument,
    plan_options,
)


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options("microbatch_size", "cluster", "compile")
@click.option("--device", type=OneOf(["auto", "cpu", "cuda"]), default="cpu", help="Where to measure.")
@click.option("--save", type=NEW_FILE, help="Write the profile to this JSON file.")
@click.option("--top", type=click.IntRange(1), default=15, help="Rows of the table.")
@json_option
def profile(
    *,
    model: str | None,
    microbatch_size: int,
    device: str,
    cluster: str | None,
    compile: bool,
    save: Path | None,
    top: int,
    as_json: bool,
) -> None:
    """Measure, or estimate, the cost of every op of MODEL.

    With several kinds of device in the cluster, the first counts.
    """
    from .. import planning
    from ..run_options import named_device

    exclusive("cluster", "device", hint="leave out one: with a cluster nothing is measured")
    exclusive(
        "cluster",
        "compile",
        hint="leave out one: times by roofline are of eager ops, compiled ones have to be measured",
    )
    described, device = cluster_of(cluster), named_device(device)
    devices = {device} if described is None else {each.name for each in described.devices}
    captured = planning.capture(job_of(model), microbatch_size, devices=devices)
    if described is None:
        costs = planning.profile(captured, device=device, compile=compile)
    else:
        estimated = planning.estimate(captured.graph, described, captured=captured)
        costs = estimated[described.devices[0].name]
    if save is not None:
        save_noun(costs, save)
    graph = captured.graph
    kinds = {op.target: {"calls": 0, "forward_s": 0.0, "backward_s": 0.0} for op in graph.ops}
    for op in graph.ops:
        kind, cost = kinds[op.target], costs.costs[op.name]
        kind["calls"] += 1
        kind["forward_s"] += cost.forward_s
        kind["backward_s"] += cost.backward_s
    slowest = sorted(kinds.items(), key=lambda item: -(item[1]["forward_s"] + item[1]["backward_s"]))
    parts = ("forward_s", "input_grad_s", "weight_grad_s")
    total = {part: sum((getattr(c, part) for c in costs.costs.values()), 0.0) for part in parts}
    parameters = sum(prod(p.shape) for p in graph.parameters)

    def screen() -> Iterator[Table | str]:
        yield (
            f"{graph.name}: {len(graph.ops)} ops, {parameters:,} parameters, "
            f"{costs.source} on {costs.device} with {', '.join(costs.batch)}"
        )
        if costs.compiled:
            yield f"compiled: {costs.compiled}"
        backward_s = total["input_grad_s"] + total["weight_grad_s"]
        total_s = total["forward_s"] + backward_s
        lines: list[tuple[Any, ...]] = [(target, *kind.values()) for target, kind in slowest[:top]]
        lines.append(("all", len(graph.ops), total["forward_s"], backward_s))
        columns = (
            Column("op", left=True),
            Column("calls"),
            *(
                Column(f"{part} ms", lambda seconds: f"{seconds * 1e3:.3f}")
                for part in ("forward", "backward")
            ),
            Column("share", show_share),
        )
        rows = [(*line, (line[2] + line[3]) / total_s if total_s else None) for line in lines]
        yield Table("", columns, rows)

    result = {
        "model": graph.name,
        "device": costs.device,
        "source": costs.source,
        "compiled": costs.compiled or None,
        "batch": costs.batch,
        "ops": len(graph.ops),
        "parameters": parameters,
        **total,
        "kinds": [{"target": target, **kind} for target, kind in slowest],
    }
    emit(result, screen(), as_json=as_json)
