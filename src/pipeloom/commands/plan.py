"""pipeloom plan: cut a model into stages, and say what becomes of residuals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..ir.errors import ConfigError
from .common import (
    FILE,
    MODEL_HELP,
    NEW_FILE,
    cluster_of,
    console,
    exclusive,
    job_of,
    json_option,
    load_profile,
    model_argument,
    new_table,
    plan_options,
    print_json,
    settings_of,
)
from .plan_shape import print_shape
from .plan_step import PlannedStep, made_of_ops, rehearsed_step, why_no_ranks

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..ir.cluster import Cluster
    from ..ir.plan import Plan
    from ..plan_request import PlanRequest
    from ..planner.microbatch_sizes import ProfiledModel
    from ..planner.what_if import Change
    from ..settings import PlanSettings


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options(auto=" auto: ranks, replicas and micro-batches are chosen for --cluster and --global-batch.")
@click.option("--max-batch", is_flag=True, help="Search the largest micro-batch size that fits.")
@click.option(
    "--best-batch", is_flag=True, help="With --global-batch: search the micro-batch size of the fastest step."
)
@click.option("--profile", "profile_file", type=FILE, help="Use this saved profile instead of measuring.")
@click.option("--planners", is_flag=True, help="List the planners and stop.")
@click.option(
    "--pair-nodes",
    is_flag=True,
    help="Put first and last ranks together on nodes, which then need about as much host memory.",
)
@click.option("--closed-form", is_flag=True, help="With --ranks auto: by formulas, without simulating.")
@click.option("--what-if/--no-what-if", default=True, help="Plan again with 10 % more memory, bandwidth.")
@click.option(
    "--rehearse/--no-rehearse",
    default=True,
    help="Whether the ranks of a plan for this machine rehearse a step, to say what it takes.",
)
@click.option("--output", "-o", type=NEW_FILE, help="Write the plan to this JSON file.")
@json_option
def plan(*, planners: bool, closed_form: bool, as_json: bool, **options: Any) -> None:
    """Cut MODEL into stages and print what each runs, takes and holds, what limits the plan, and what a bit
    more memory or bandwidth would buy.

    With --json: predicted_step_s; predicted_by: rehearsal where the plan's ranks rehearsed a step on this
    machine, else profile or roofline; profiled_step_s: what its ops make alone, which the plan file has;
    not_rehearsed: why, else null; compiled: with --compile, how the times of compiled functions compare with
    eager ones, else null; planner, schedule, weights, replicas, microbatches, microbatch_size, graph;
    limits: a list of sentences; branches: where stages run side by side, step_s, peak_bytes and depth with
    branches and with no_branches, of the latter also sequential_step_s (each stage waits for the one in
    front), else null; what_if: a list of what, step_s, gain (share of the step's time); and stages, of the
    first replica: a list of stage, rank, node, ops, first_op, last_op, layers, reads (stages), depth (ranks
    of the longest path from it to the end), forward_s, input_grad_s, weight_grad_s, recompute_s, offload_s,
    reload_s, turn_s, bytes by kind at the peak, of one micro-batch's residuals kept_bytes, recomputed_bytes
    and offloaded_bytes, peak_bytes, cap_bytes, filled; and what offloading them all would ask:
    offload_ratio (k, copying by computing), link_use (share of the time that the link to the host copies),
    offloadable_stages (of its rank, so that all copies hide).

    With --ranks auto it chooses width, depth, rows per micro-batch and recomputation. --json then has width,
    depth, microbatch_size, recompute, microbatches (per pipeline), rows_per_s, step_s, peak_bytes. With
    --closed-form it has next: a list of the same of the next best; without, simulated (how many shapes),
    planner, limits and stages.
    """
    if planners:
        _list(as_json)
    elif options["ranks"] == "auto":
        print_shape(_print, closed_form=closed_form, as_json=as_json, **options)
    elif closed_form:
        raise ConfigError("--closed-form without --ranks auto", hint="add it: --ranks auto --closed-form")
    else:
        _plan(as_json=as_json, **options)


def _plan(
    *,
    model: str | None,
    profile_file: Path | None,
    output: Path | None,
    as_json: bool,
    pair_nodes: bool,
    max_batch: bool,
    best_batch: bool,
    what_if: bool,
    rehearse: bool,
    **options: Any,
) -> None:
    exclusive(
        "memory",
        "cluster",
        hint="say each device's memory in the cluster, as in --cluster '4 x a100-40 with 20GiB'",
    )
    exclusive("max_batch", "best_batch")
    for search in ("max_batch", "best_batch"):
        exclusive(search, "profile_file", hint="a profile is of one size: leave out one")
        exclusive(
            search,
            "compile",
            hint="each size would be compiled: search the size without --compile, then plan for it",
        )
    settings, profiled = settings_of(options), load_profile(profile_file)
    if pair_nodes:
        exclusive(
            "pair_nodes",
            "replicas",
            hint="leave out one: the replicas of a stage are on neighbouring ranks",
        )
        settings = settings.changed(cluster=_paired(settings))
    why_not = why_no_ranks(rehearse, settings.cluster is not None, profile_file)
    from ..train.config import Config
    from ..train.rank_processes import RankProcesses

    with RankProcesses(0 if why_not else settings.devices, Config(job=model), needed=False) as processes:
        from .. import planning  # torch is loaded here, while the ranks load it, too

        job = job_of(model)
        with _watching() as watch:
            request = planning.make_request(job, settings, watch=watch)
            if best_batch or max_batch:
                plan, planned = (planning.plan_best if best_batch else planning.plan_largest)(request, job)
            else:
                plan, planned = planning.plan_size(request, job, profiled=profiled)
            if output is not None:
                plan.save(output)
            changes = request.changes(plan, planned) if what_if else []
        if why_not:
            step = made_of_ops(plan, why_not, roofline=not request.local and profiled is None)
        else:
            step = rehearsed_step(request, plan, planned, job, processes, model=model)
    _show(request, plan, planned, step, changes, as_json=as_json)


def _show(
    request: PlanRequest,
    plan: Plan,
    planned: ProfiledModel,
    step: PlannedStep,
    changes: list[Change],
    *,
    as_json: bool,
) -> None:
    from .. import machine, plan_request
    from ..planner import plan_table

    rows = plan_table.plan_rows(plan, planned.graph, request.cluster)
    told, changes = step.told(plan), step.scaled(changes)
    if as_json:
        figures = step.figures | {key: getattr(plan, key) for key in JSON_KEYS} | {"replicas": plan.width}
        what_ifs = [vars(change) for change in changes]
        said = {
            "compiled": plan.notes.get(plan_request.COMPILED),
            "limits": plan_table.limits(told),
            "branches": plan_table.branch_figures(told) or None,
        }
        print_json({**figures, **said, "what_if": what_ifs, "stages": rows})
    else:
        speed = [machine.disk_speed(request.cluster)] if request.options.offload_dir else []
        _print(
            rows,
            told,
            [step.sentence, *plan_request.times_of(plan), *speed, *plan_table.limits(told)],
            changes,
        )


def _paired(settings: PlanSettings) -> Cluster:
    """The devices of the ranks, first and last ones together on nodes. Raises: ConfigError without nodes."""
    from ..planner.host_memory import pair_low_with_high

    cluster = cluster_of(settings.cluster)
    if cluster is None:
        raise ConfigError(
            "--pair-nodes without --cluster", hint="name the devices, as in '2 nodes of 8 x a100-80'"
        )
    return pair_low_with_high(replace(cluster, devices=cluster.devices[: settings.ranks]))


JSON_KEYS = (
    "planner",
    "schedule",
    "weights",
    "microbatches",
    "microbatch_size",
    "graph",
)
"""What `--json` says of the whole plan."""


class _Line:
    """A line on standard error, on a terminal, that says how a search goes on."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("planning", total=None, way="")
        self.before, self.last = 0, 0

    def weighed(self, count: int) -> None:
        # A search for another request, as for another size of micro-batches, counts from 1 again.
        self.before += self.last if count < self.last else 0
        self.last = count
        self.progress.update(self.task, completed=self.before + count)

    def tried(self, schedule: str, number: int, of: int, best: tuple[str, float] | None) -> None:
        fastest = "" if best is None else f", best {1e3 * best[1]:.4g} ms ({best[0]})"
        self.progress.update(self.task, way=f"; {schedule}, {number} of {of}{fastest}")


@contextmanager
def _watching() -> Iterator[_Line]:
    """The line while the search lasts."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = "planning: {task.completed} stages weighed{task.fields[way]}"
    columns = (SpinnerColumn(), TextColumn(text), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        yield _Line(progress)


def _list(as_json: bool) -> None:
    from ..planner.registry import PLANNERS

    rows = [
        {
            "name": name,
            "granularity": p.granularity,
            "optimises": p.optimises,
            "about": p.about,
            "source": p.source,
        }
        for name, p in PLANNERS.items()
    ]
    if as_json:
        print_json({"planners": rows})
        return
    heads = ("planner", "granularity", "frees memory", "about", "source")
    table = new_table(*heads, left=heads)
    for row in rows:
        table.add_row(row["name"], row["granularity"], row["optimises"], row["about"], row["source"])
    console().print(table)


def _print(rows: list[dict[str, Any]], plan: Plan, sentences: list[str], changes: list[Change]) -> None:
    from ..ir.units import format_bytes

    ways = [kind for kind in ("recomputed", "offloaded") if any(row[f"{kind}_bytes"] for row in rows)]
    kinds = ("kept", *ways) if ways else ("residuals",)
    chain = all(row.get("reads") in (None, (), (row["stage"] - 1,)) for row in rows)
    wiring = [] if chain else ["reads", "depth"]
    nodes = ["node"] if len({row.get("node") for row in rows}) > 1 else []
    heads = ["stage", "rank", *nodes, *wiring, "ops", "layers", "F ms", "B ms", "parameters"]
    linked = any(row["offload_ratio"] is not None for row in rows)
    more = ("k", "link") if linked else ()
    table = new_table(*heads, *kinds, "peak", "cap", *more, left=("reads", "layers"), no_wrap=True)
    for row in rows:
        backward_s = row["input_grad_s"] + row["weight_grad_s"] + row["recompute_s"]
        cap = row["cap_bytes"]
        table.add_row(
            str(row["stage"]),
            str(row["rank"]),
            *([str(row["node"])] if nodes else []),
            *([] if chain else [", ".join(map(str, row["reads"])) or "–", str(row["depth"])]),
            str(row["ops"]),
            row["layers"],
            f"{row['forward_s'] * 1e3:.2f}",
            f"{backward_s * 1e3:.2f}",
            format_bytes(row["parameters_bytes"]),
            *(format_bytes(row[f"{kind}_bytes"]) for kind in kinds),
            format_bytes(row["peak_bytes"]),
            "–" if cap is None else format_bytes(cap),
            *(_copying(row) if linked else ()),
        )
    out = console()
    if not out.is_terminal:  # a size that is cut short says nothing
        out.width = max(out.width, out.measure(table, options=out.options.update(max_width=1000)).maximum)
    out.print(table)
    if ways:
        out.print(f"{', '.join(kinds)}: of one micro-batch's residuals", highlight=False)
    if linked:
        out.print(_offloadable(rows), highlight=False)
    rows_each = f"{plan.microbatches} micro-batches of {plan.microbatch_size}"
    rows_each += f" on {plan.width} replicas of every stage" if plan.width > 1 else ""
    out.print(f"predicted step: {plan.predicted_step_s * 1e3:.1f} ms, {rows_each}", highlight=False)
    for sentence in sentences:
        out.print(sentence, highlight=False)
    for change in changes:
        out.print(f"{change.what}: {_gain(change)}", highlight=False)


def _copying(row: dict[str, Any]) -> tuple[str, str]:
    """Of a stage, k and how much of the time its link copies."""
    k, use = row["offload_ratio"], row["link_use"]
    return ("–", "–") if k is None else (f"{k:.2f}", f"{use:.0%}")


def _offloadable(rows: list[dict[str, Any]]) -> str:
    """How many stages of each rank may be offloaded whole.

    >>> row = {"rank": 0, "offloadable_stages": 1}
    >>> print(_offloadable([row, row | {"rank": 1, "offloadable_stages": 0}]))
    k: copying by computing. Copies hide if these leave whole: 1 of 1 stages of rank 0, 0 of 1 of rank 1
    """
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["rank"]] = counts.get(row["rank"], 0) + 1
    allowed = {row["rank"]: row["offloadable_stages"] or 0 for row in rows}
    each = {(allowed[rank], count) for rank, count in counts.items()}
    if len(each) == 1 and len(counts) > 1:
        said = f"{allowed[0]} of the {counts[0]} stages of each rank"
    else:
        listed = [(f"{allowed[rank]} of {counts[rank]}", rank) for rank in sorted(counts)]
        said = ", ".join(f"{n}{' stages' if at == 0 else ''} of rank {r}" for at, (n, r) in enumerate(listed))
    return f"k: copying by computing. Copies hide if these leave whole: {said}"


def _gain(change: Change) -> str:
    if change.step_s is None:
        return "no plan"
    return f"step {change.step_s * 1e3:.1f} ms, {change.gain:+.1%} faster"
