"""pipeloom profile: what each op of a model costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import (
    MODEL_HELP,
    NEW_FILE,
    cluster_of,
    console,
    exclusive,
    job_of,
    json_option,
    model_argument,
    new_table,
    plan_options,
    print_json,
)

if TYPE_CHECKING:
    from ..ir.graph import OpGraph
    from ..ir.profile import Profile


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options("microbatch_size", "cluster", "compile")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to measure."
)
@click.option("--save", type=NEW_FILE, help="Write the profile to this JSON file.")
@click.option("--save-graph", type=NEW_FILE, help="Write the captured graph to this JSON file.")
@click.option("--top", type=click.IntRange(1), default=15, show_default=True, help="Rows of the table.")
@json_option
def profile(
    *,
    model: str | None,
    microbatch_size: int,
    device: str,
    cluster: str | None,
    compile: bool,
    save: Path | None,
    save_graph: Path | None,
    top: int,
    as_json: bool,
) -> None:
    """Measure, or estimate, the cost of every op of MODEL.

    With --json: model, device, source ("measured" or "roofline"), compiled (with --compile how costs compare
    with those of eager ops, else null), batch, ops, parameters, forward_s,
    input_grad_s, weight_grad_s (of one micro-batch, summed over ops), and kinds: a list of target, calls,
    forward_s, backward_s, the slowest first. With several kinds of device in the cluster, the first counts.
    """
    from .. import planning
    from ..ir import json_codec

    exclusive(
        "cluster",
        "compile",
        hint="leave out one: times by roofline are of eager ops, compiled ones have to be measured",
    )
    described = cluster_of(cluster)
    devices = {device} if described is None else {each.name for each in described.devices}
    captured = planning.capture(job_of(model), microbatch_size, devices=devices)
    if described is None:
        costs = planning.profile(captured, device=device, compile=compile)
    else:
        costs = planning.estimate(captured.graph, described)[described.devices[0].name]
    for noun, path in ((costs, save), (captured.graph, save_graph)):
        if path is not None:
            json_codec.save(noun, path)
    figures = summary(captured.graph, costs)
    if as_json:
        print_json(figures)
    else:
        _print(figures, top)


@dataclass
class _Kind:
    target: str
    calls: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


def summary(graph: OpGraph, costs: Profile) -> dict[str, Any]:
    """The documented keys of `--json`."""
    kinds: dict[str, _Kind] = {}
    for op in graph.ops:
        kind, cost = kinds.setdefault(op.target, _Kind(op.target)), costs.costs[op.name]
        kind.calls += 1
        kind.forward_s += cost.forward_s
        kind.backward_s += cost.backward_s
    by_time = sorted(kinds.values(), key=lambda k: -(k.forward_s + k.backward_s))
    return {
        "model": graph.name,
        "device": costs.device,
        "source": costs.source,
        "compiled": costs.compiled or None,
        "batch": list(costs.batch),
        "ops": len(graph.ops),
        "parameters": sum(prod(p.shape) for p in graph.parameters),
        "forward_s": _sum(c.forward_s for c in costs.costs.values()),
        "input_grad_s": _sum(c.input_grad_s for c in costs.costs.values()),
        "weight_grad_s": _sum(c.weight_grad_s for c in costs.costs.values()),
        "kinds": [vars(kind) for kind in by_time],
    }


def _print(figures: dict[str, Any], top: int) -> None:
    out = console()
    out.print(
        f"{figures['model']}: {figures['ops']} ops, {figures['parameters']:,} parameters, "
        f"{figures['source']} on {figures['device']} with {', '.join(figures['batch'])}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if figures["compiled"]:
        out.print(f"compiled: {figures['compiled']}", highlight=False, soft_wrap=True)
    table = new_table("op", "calls", "forward ms", "backward ms", "share", left=("op",))
    total = _sum(k["forward_s"] + k["backward_s"] for k in figures["kinds"])
    for kind in figures["kinds"][:top]:
        both = kind["forward_s"] + kind["backward_s"]
        table.add_row(
            kind["target"],
            str(kind["calls"]),
            f"{kind['forward_s'] * 1e3:.3f}",
            f"{kind['backward_s'] * 1e3:.3f}",
            f"{both / total:.1%}" if total else "",
        )
    backward_s = figures["input_grad_s"] + figures["weight_grad_s"]
    table.add_row(
        "all", str(figures["ops"]), f"{figures['forward_s'] * 1e3:.3f}", f"{backward_s * 1e3:.3f}", ""
    )
    out.print(table)


def _sum(values: Iterable[float]) -> float:
    return float(sum(values))
