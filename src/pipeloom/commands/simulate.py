"""pipeloom simulate: what a step of a plan will look like."""

from __future__ import annotations

from pathlib import Path

import click

from ..clusters.names import cpu_cluster
from ..ir.errors import ConfigError, PlanError
from ..ir.text import as_plain, format_bytes
from .common import (
    FILE,
    MODEL_HELP,
    NEW_FILE,
    cluster_of,
    emit,
    job_of,
    json_option,
    load_profile,
    model_argument,
    not_the_built_in,
    plan_options,
)


@click.command(epilog=MODEL_HELP)
@click.argument("plan_file", metavar="PLAN", type=FILE)
@model_argument
@click.option("--profile", "profile_file", type=FILE, help="Saved profile, instead of measuring MODEL.")
@plan_options("cluster")
@click.option("--html", type=NEW_FILE, help="Write a report page.")
@click.option("--trace", type=NEW_FILE, help="Write a trace for Perfetto.")
@json_option
def simulate(
    *,
    plan_file: Path,
    model: str | None,
    profile_file: Path | None,
    cluster: str | None,
    html: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate one step of PLAN, made for MODEL, and draw it.

    Without --profile and --cluster, ops take what they are measured to take on this machine, kept for a day.
    """
    from .. import planning, reports
    from ..ir.plan import load_plan
    from ..plan_request import COMPILED
    from ..simulator.summary import summarise
    from ..viewer import chrome, stage_graph, terminal
    from ..viewer.html import write_report

    plan = load_plan(plan_file)
    described = cluster_of(cluster)
    profiled, devices = load_profile(profile_file), described or cpu_cluster(plan.ranks)
    if COMPILED in plan.notes:
        planning.require_compiled(profiled, described)
    if profiled is not None and described is None and profiled.device != devices.devices[0].name:
        raise ConfigError(
            f"{profile_file} is of the device {profiled.device}, and nothing says how such are linked",
            hint=f"name the cluster, as in --cluster '{plan.ranks} x {profiled.device}'",
        )
    try:
        captured = planning.model_of_plan(job_of(model), plan, described, profiled=profiled)
        graph = captured.graph
        timeline = planning.simulate(plan, graph, captured.profiles, devices)
    except PlanError as error:
        if model is None:
            raise not_the_built_in(plan_file) from error
        raise
    if html is not None:
        write_report(
            html,
            title=f"{graph.name}: {plan.schedule}, simulated",
            predicted=timeline,
            stages=reports.stage_rows(graph, plan),
            edges=stage_graph.stage_edges(plan.stage_graph(graph)),
            explanations=reports.explain_steps(plan, graph, [timeline], devices),
            caps=plan.caps,
        )
    if trace is not None:
        chrome.write_trace(trace, [timeline])
    room = [device.memory_bytes for device in described.devices[: plan.ranks]] if described else plan.caps
    caps = [*map(min, room, plan.caps or room)]
    drawn = [*terminal.report(predicted=timeline, width=terminal.console().width)]
    if described is None:
        drawn.append("the step counts ops alone; what ranks do between them is rehearsed by `pipeloom plan`")
    drawn += [
        f"rank {rank} holds {format_bytes(peak)}, {format_bytes(peak - cap)} more than its cap of "
        f"{format_bytes(cap)}"
        for rank, cap in zip(range(timeline.ranks), caps, strict=False)
        if (peak := timeline.peak_bytes(rank)) > cap
    ]
    emit({**as_plain(summarise(timeline)), "caps": caps}, drawn, as_json=as_json)
