"""`pipeloom plan --ranks auto`: the shape of a run, chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..ir.errors import ConfigError
from .common import console, exclusive, job_of, new_table, print_json, settings_of
from .plan_step import made_of_ops, why_no_ranks

if TYPE_CHECKING:
    from ..ir.plan import Plan
    from ..plan_request import PlanRequest
    from ..planner.shape_search import RankedShape
    from ..planner.what_if import Change
    from ..shapes import ShapedPlan

    Show: TypeAlias = Callable[[list[dict[str, Any]], Plan, list[str], list[Change]], None]

SHOWN = 5
"""Shapes that the table has: the chosen one, and the next best."""

CHOSEN = (
    "replicas",
    "chunks",
    "microbatches",
    "microbatch_size",
    "max_batch",
    "best_batch",
    "memory",
    "offload_dir",
    "profile_file",
    "pair_nodes",
    "shard_optimizer",
    "compile",
)
"""Options that say what is chosen here, or do not go with a cluster described by figures."""


def print_shape(show: Show, *, closed_form: bool, as_json: bool, **options: Any) -> None:
    """Choose and print.

    show: prints a plan.  options: those of `pipeloom plan`.
    Raises: ConfigError for those that do not fit.
    """
    for name in CHOSEN:
        exclusive(
            "ranks",
            name,
            hint="leave out one: sizes follow from --cluster and --global-batch",
        )
    output: Path | None = options["output"]
    if closed_form and output is not None:
        raise ConfigError(
            "--closed-form makes no plan that could be written",
            hint="leave it out, and plans are simulated",
        )
    from .. import planning, shapes
    from ..planner import plan_table

    job = job_of(options["model"])
    request = planning.make_request(job, settings_of({**options, "ranks": 1}))
    if closed_form:
        _print_shapes(shapes.closed_form_shapes(request, job), request, as_json=as_json)
        return
    shaped, model = shapes.plan_shape(request, job)
    if output is not None:
        shaped.plan.save(output)
    rows = plan_table.plan_rows(shaped.plan, model.graph)
    if as_json:
        print_json({**_figures(shaped), "limits": plan_table.limits(shaped.plan), "stages": rows})
    else:
        step = made_of_ops(shaped.plan, why_no_ranks(True, True, None), roofline=True)
        show(rows, shaped.plan, [step.sentence, *plan_table.limits(shaped.plan), *_sentences(shaped)], [])


def _figures(shaped: ShapedPlan) -> dict[str, Any]:
    """What `--json` says of a shape with a plan."""
    plan = shaped.plan
    return {
        **vars(shaped.shape),
        "microbatches": plan.microbatches // plan.width,
        "rows_per_s": shaped.rows_per_s,
        "step_s": plan.predicted_step_s,
        "peak_bytes": max(plan.peaks),
        "simulated": shaped.simulated,
        "planner": plan.planner,
    }


def _sentences(shaped: ShapedPlan) -> list[str]:
    shape, plan = shaped.shape, shaped.plan
    each = f"{plan.microbatches // plan.width} micro-batches of {plan.microbatch_size} rows"
    treated = "some residuals recomputed" if shape.recompute else "every residual kept"
    return [
        f"width {shape.width}, depth {shape.depth}, {each} in each pipeline, {treated}",
        f"{shaped.rows_per_s:.2f} rows/s, the most of what was simulated ({shaped.simulated} shapes)",
    ]


def _print_shapes(ranked: list[RankedShape], request: PlanRequest, *, as_json: bool) -> None:
    batch = request.options.global_batch
    assert batch is not None, "refused before"
    rows = [
        {
            **vars(shape),
            "microbatches": shape.microbatches(batch),
            "rows_per_s": rate,
            "step_s": batch / rate,
            "peak_bytes": round(peak),
        }
        for shape, rate, peak in ranked[:SHOWN]
    ]
    if as_json:
        print_json({**rows[0], "next": rows[1:]})
        return
    from ..ir.units import format_bytes

    table = new_table("width", "depth", "rows", "micro-batches", "recompute", "rows/s", "step ms", "peak")
    for row in rows:
        table.add_row(
            str(row["width"]),
            str(row["depth"]),
            str(row["microbatch_size"]),
            str(row["microbatches"]),
            "yes" if row["recompute"] else "no",
            f"{row['rows_per_s']:.2f}",
            f"{row['step_s'] * 1e3:.1f}",
            format_bytes(row["peak_bytes"]),
        )
    out = console()
    out.print(table)
    best = rows[0]
    out.print(
        f"{len(ranked)} shapes fit, by formulas; chosen: {best['width']} x {best['depth']} stages, "
        f"{best['microbatches']} micro-batches of {best['microbatch_size']} rows in each",
        highlight=False,
    )
