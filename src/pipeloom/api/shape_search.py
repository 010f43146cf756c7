"""The shape of a run for a model, a cluster and a global batch: how many pipelines, how deep, which rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ..ir.errors import ConfigError, PlanError
from ..ir.weight_policy import FLUSH
from ..planner.block_costs import block_costs
from ..planner.microbatch_sizes import ProfiledModel
from ..planner.request import PlanOptions
from ..planner.shape_search import RankedShape, ShapeRequest, rank_shapes, refuse_unlike_devices
from ..schedules.registry import entry
from ..tracer.job import Job
from .largest_batch import CapturableSizes, ModelAt
from .passes import captured_model
from .plan_request import PlanRequest

SAMPLED = (2, 8, 4, 3, 16, 6, 12)
"""Rows of the micro-batches that the model is captured with, the first two of them at which it can be."""

CLOSED_FORMS = {
    ("1f1b", FLUSH): "flush",
    ("1f1b", "2bw"): "2bw",
    ("gpipe", FLUSH): "gpipe",
}
"""(schedule, weights) -> the name of its closed form."""


def closed_form_shapes(request: PlanRequest, job: Job) -> list[RankedShape]:
    """All shapes that fit by the formulas of `planner/shape_search.py`, the fastest first.

    request: `stages` and `microbatches` do not matter.  job: captured at two sizes of micro-batches.
    Raises: ConfigError if the request has no cluster or no global batch; PlanError if there is no closed
        form of the schedule, or the model has no repeated layers; InfeasibleError if nothing fits.
    """
    refuse_unshaped(request)
    name = pipelining_of(request.schedule, request.options.weights)
    _allowed(request.options)
    first, second = sampled_models(lambda size: captured_model(job, size, request.cluster))
    return rank_shapes(shape_request(request, name, first, second))


def refuse_unshaped(request: PlanRequest) -> None:
    """Raises: ConfigError, PlanError if shapes cannot be chosen for a request."""
    if request.local or request.global_batch is None:
        lacks = "--cluster" if request.local else "--global-batch"
        raise ConfigError(
            f"--stages auto without {lacks}",
            hint="say for which devices and how many rows per step, as in --cluster '8 x v100-16' "
            "--global-batch 256",
        )
    refuse_unlike_devices(request.cluster)


def pipelining_of(schedule: str, weights: str | None) -> str:
    """The closed form of a schedule. Raises: PlanError if there is none.

    >>> pipelining_of("1f1b", None), pipelining_of("1f1b", "2bw")
    ('flush', '2bw')
    """
    asked = schedule, weights or entry(schedule).weights
    if asked not in CLOSED_FORMS:
        known = ", ".join(f"{name} with {policy}" for name, policy in CLOSED_FORMS)
        raise PlanError(
            f"there is no closed form of schedule {asked[0]} with weights {asked[1]}",
            hint=f"use {known}; or leave out --closed-form, and plans are simulated",
        )
    return CLOSED_FORMS[asked]


def sampled_models(model_at: ModelAt, sizes: Sequence[int] = SAMPLED) -> tuple[ProfiledModel, ProfiledModel]:
    """A model at two sizes between which, and beyond, others are judged.

    Raises: CaptureError, PlanError if it cannot be captured at two of them.
    """
    capturable = CapturableSizes(sizes, model_at)
    models = list(islice(capturable.models(sizes), 2))
    if len(models) < 2:
        raise PlanError(
            f"the model can be captured at fewer than two of {', '.join(map(str, sizes))} rows",
            hint="choose the shape by hand: --stages N --microbatch-size ROWS",
        )
    return models[0], models[1]


def shape_request(
    request: PlanRequest, pipelining: str, first: ProfiledModel, second: ProfiledModel
) -> ShapeRequest:
    """The closed form of a request, from the model at two sizes."""
    assert request.global_batch is not None, "see refuse_unshaped"
    return ShapeRequest(
        costs=block_costs(first, second, request.cluster),
        cluster=request.cluster,
        global_batch=request.global_batch,
        pipelining=pipelining,
        optimizer_bytes=first.graph.state_ratio,
        recompute=_allowed(request.options),
    )


def _allowed(options: PlanOptions) -> tuple[bool, ...]:
    """Whether stages may, or may not, be recomputed. Raises: PlanError if they are to offload only."""
    if options.treatments is None or "recompute" in options.treatments:
        return False, True
    if "offload" in options.treatments:
        raise PlanError(
            "the closed form does not know of offloading",
            hint="use --treat recompute or none, or leave out --closed-form",
        )
    return (False,)
