"""The micro-batch size with the fastest step, for one number of rows per step.

Larger micro-batches use a device better and cost fewer messages; smaller ones fill and drain the pipeline
faster and hold less. Which wins depends on how deep the pipeline is, so the simulated step decides.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ..ir.errors import ConfigError, InfeasibleError, PlanError, ScheduleError
from ..ir.plan import Plan
from ..planner.microbatch_sizes import ProfiledModel, interpolate_sample
from .advice import plan_with_advice
from .largest_batch import CapturableSizes, ModelAt, sizes_of
from .plan_request import PlanRequest

VERIFIED = 3
"""Sizes that are captured and planned as they are, the best by interpolation first."""


def best_plan(request: PlanRequest, start: int, model_at: ModelAt) -> tuple[Plan, ProfiledModel]:
    """The plan with the fastest simulated step over all sizes that divide the global batch, and the model at
    that size; of equally fast ones the smallest.

    start: a size to capture the model at first.  model_at: captures and profiles.
    Sizes are ranked by interpolation between two at which the model was captured, unless it has other ops at
    one of them; the first few are then captured themselves. Sizes at which the model cannot be captured, or
    that the schedule cannot run, are passed over.
    Raises: ConfigError without a global batch, or if no size divides it among the schedule's directions;
        InfeasibleError if no size fits; CaptureError if the model cannot be captured at any that was tried.
    """
    if request.global_batch is None:
        raise ConfigError(
            "the best micro-batch size is that of a number of rows per step, and there is none",
            hint="say how many rows a step has: --global-batch 64",
        )
    sizes = sizes_of(request)
    capturable = CapturableSizes(sizes, model_at)
    near = min(sizes, key=lambda size: abs(size - start))
    ends = capturable.around(near) if len(sizes) > VERIFIED else []
    ranked = list(sizes)
    if len(ends) > 1 and ends[0].graph.fingerprint == ends[1].graph.fingerprint:
        guessed = {size: _step_s(request, interpolate_sample(ends[0], ends[1], size)) for size in sizes}
        ranked = sorted(
            (size for size in sizes if guessed[size] is not None), key=lambda size: guessed[size] or 0.0
        )
        ranked = ranked[:VERIFIED] or list(sizes)[:VERIFIED]
    best: tuple[Plan, ProfiledModel] | None = None
    for model in capturable.models(sorted(ranked)):
        try:
            plan = request.plan(model, explained=False)
        except (InfeasibleError, ScheduleError):
            continue
        if best is None or plan.predicted_step_s < best[0].predicted_step_s * (1 - 1e-9):
            best = plan, model
    if best is not None:
        return best
    model = next(capturable.models(ranked), None) or model_at(near)
    return plan_with_advice(request, model), model  # raises, with what would fit


def _step_s(request: PlanRequest, model: ProfiledModel) -> float:
    """Seconds of the planned step; infinite if there is no plan."""
    try:
        return replace(request, watch=None).plan(model, explained=False).predicted_step_s
    except (PlanError, ScheduleError):
        return inf
