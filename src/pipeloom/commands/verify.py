"""pipeloom verify: does the pipeline give the numbers of one process?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..clusters.names import cpu_cluster
from ..ir.cluster import Link
from ..plan_settings import LARGEST
from .common import (
    FILE,
    MODEL_HELP,
    Amount,
    emit,
    exclusive,
    job_of,
    json_option,
    model_argument,
    plan_options,
    settings_of,
)

if TYPE_CHECKING:
    from ..verification import Verification


LINK = Link(bandwidth_bytes_per_s=1e9)
"""To the disk, for schedules with copies: these go to the system's temporary folder."""

PLANNED = (
    *("ranks", "replicas", "schedule", "chunks", "microbatches", "microbatch_size"),
    *("split_backward", "weights", "shard_optimizer"),
)
"""Options that say what to plan."""


@click.command(epilog=MODEL_HELP)
@model_argument
@plan_options(*PLANNED)
@click.option("--plan", "plan_file", type=FILE, help="Verify this plan, instead of making one.")
@click.option(
    "--tolerance",
    type=Amount(min=0),
    help="Largest relative difference. By default what the parameters' dtype explains.",
)
@click.option("--seed", type=click.IntRange(-LARGEST, LARGEST), default=1, help="Of the batch.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    *,
    model: str | None,
    plan_file: Path | None,
    tolerance: float | None,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Train MODEL one step in one process and in the pipeline, and compare.

    Prints the largest relative difference of the loss, of the gradients, of the updated parameters and of the
    buffers; exits with 1 if one is above the tolerance or not finite. Warns if the loss of all micro-batches
    as one batch is not the mean over theirs.
    """
    from ..ir.plan import load_plan

    for name in PLANNED:
        exclusive("plan_file", name, hint="leave out one: a plan says it itself")
    plan = None if plan_file is None else load_plan(plan_file)
    job = job_of(model)
    from .. import planning
    from ..runnable import require_runnable
    from ..verification import verify as compare

    settings = settings_of(options)
    require_runnable(settings.named_schedule)  # which loads the operations of a user's own

    if plan is None:  # times do not matter here, so none are measured, and nothing is searched
        if settings.schedule is not None or settings.chunks is None:  # else one with so many is chosen
            settings = settings.changed(planner="exact")
        cpus = cpu_cluster(settings.devices)
        devices = tuple(replace(device, host_link=LINK) for device in cpus.devices)
        plan = planning.plan(job, settings, cluster=replace(cpus, devices=devices))
    verification = compare(job, plan, tolerance=tolerance, seed=seed)
    result = {name: getattr(verification, name) for name in ("passed", "independent", "verdict", "hint")}
    result |= {"stages": len(plan.stages), "ranks": plan.ranks, "schedule": plan.schedule}
    result |= vars(verification)
    of_plan = f"stages {len(plan.stages)}, ranks {plan.ranks}, schedule {plan.schedule}"
    emit(result, [of_plan, *report(verification)], as_json=as_json)
    ctx.exit(0 if verification.passed else 1)


NOT_EQUAL_HINT = (
    "do they differ with --ranks 1, too? Then the forward reads what an earlier call has left, or what is "
    "not in its modules; see docs/troubleshooting.md#the-numbers-differ-from-one-process"
)


def report(verification: Verification) -> list[str]:
    lines = [
        f"compared with {verification.reference}; largest relative differences:",
        f"  loss        {verification.loss:.2e}",
    ]
    for what in ("gradients", "parameters", "buffers"):
        differences = getattr(verification, what)
        if differences:
            worst = max(differences, key=differences.__getitem__)
            lines.append(f"  {what:<11} {differences[worst]:.2e}  ({worst}, of {len(differences)})")
    if verification.hint is not None:
        return [*lines, verification.verdict, f"hint: {verification.hint}"]
    verdict = "equal within" if verification.passed else "NOT equal within"
    own = "" if verification.independent else ", compared with its own graph"
    lines.append(f"{verdict} the tolerance {verification.tolerance:.0e}{own}")
    return lines if verification.passed else [*lines, f"hint: {NOT_EQUAL_HINT}"]
