"""pipeloom profile: what each op of a model costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import (
    MODEL_HELP,
    NEW_FILE,
    cluster_of,
    emit,
    exclusive,
    job_of,
    json_option,
    model_argument,
    plan_options,
)

if TYPE_CHECKING:
    from ..ir.graph import OpGraph
    from ..ir.profile import Profile
    from ..viewer.tables import Table


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options("microbatch_size", "cluster", "compile")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to measure.")
@click.option("--save", type=NEW_FILE, help="Write the profile to this JSON file.")
@click.option("--save-graph", type=NEW_FILE, help="Write the captured graph to this JSON file.")
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
    save_graph: Path | None,
    top: int,
    as_json: bool,
) -> None:
    """Measure, or estimate, the cost of every op of MODEL.

    With several kinds of device in the cluster, the first counts.
    """
    from .. import planning
    from ..ir.text import save_noun

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
            save_noun(noun, path)
    summary = summarise(captured.graph, costs)
    emit(summary, _screen(summary, top), as_json=as_json)


@dataclass
class OpKind:
    """All calls of one kind of op."""

    target: str
    calls: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """What the ops of a model cost, in seconds of one micro-batch.

    source: "measured" or "roofline".  compiled: of compiled functions, how they compare with eager ops.
    forward_s, input_grad_s, weight_grad_s: summed over ops.  kinds: the slowest first.
    """

    model: str
    device: str
    source: str
    compiled: str | None
    batch: Sequence[str]
    ops: int
    parameters: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    kinds: Sequence[OpKind]


def summarise(graph: OpGraph, costs: Profile) -> ProfileSummary:
    kinds: dict[str, OpKind] = {}
    for op in graph.ops:
        kind, cost = kinds.setdefault(op.target, OpKind(op.target)), costs.costs[op.name]
        kind.calls += 1
        kind.forward_s += cost.forward_s
        kind.backward_s += cost.backward_s
    parts = ("forward_s", "input_grad_s", "weight_grad_s")
    return ProfileSummary(
        model=graph.name,
        device=costs.device,
        source=costs.source,
        compiled=costs.compiled or None,
        batch=costs.batch,
        ops=len(graph.ops),
        parameters=sum(prod(p.shape) for p in graph.parameters),
        **{part: sum((getattr(c, part) for c in costs.costs.values()), 0.0) for part in parts},
        kinds=sorted(kinds.values(), key=lambda k: -(k.forward_s + k.backward_s)),
    )


def _screen(summary: ProfileSummary, top: int) -> Iterator[Table | str]:
    from ..ir.text import show_share
    from ..viewer.tables import Column, Table

    yield (
        f"{summary.model}: {summary.ops} ops, {summary.parameters:,} parameters, "
        f"{summary.source} on {summary.device} with {', '.join(summary.batch)}"
    )
    if summary.compiled:
        yield f"compiled: {summary.compiled}"
    backward_s = summary.input_grad_s + summary.weight_grad_s
    total_s = summary.forward_s + backward_s
    rows = [(k.target, k.calls, k.forward_s, k.backward_s) for k in summary.kinds[:top]]
    rows.append(("all", summary.ops, summary.forward_s, backward_s))
    ms = "{:.3f}".format
    columns = (
        Column("op", left=True),
        Column("calls"),
        Column("forward ms", ms),
        Column("backward ms", ms),
        Column("share", show_share),
    )
    shares = [(forward_s + back_s) / total_s if total_s else None for _, _, forward_s, back_s in rows]
    yield Table(
        "",
        columns,
        [
            (target, calls, forward_s * 1e3, back_s * 1e3, share)
            for (target, calls, forward_s, back_s), share in zip(rows, shares, strict=True)
        ],
    )
