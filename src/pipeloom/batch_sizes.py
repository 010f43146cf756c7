"""Micro-batch sizes: the largest that fits, and that of the fastest step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from math import inf
from typing import TypeAlias

from .ir.errors import CaptureError, ConfigError, InfeasibleError, PlanError, ScheduleError
from .ir.plan import Plan
from .plan_advice import plan_with_advice
from .plan_request import PlanRequest
from .planner.microbatch_sizes import ProfiledModel, interpolate_sample, largest_size

ModelAt: TypeAlias = Callable[[int], ProfiledModel]
"""Micro-batch size -> the model captured and profiled at it."""

VERIFIED = 3
"""Sizes that are captured as they are, from the largest downwards, before one is advised."""

REACH = 64
"""Where the model cannot be captured at a size, so many smaller ones are tried in its place."""


class CapturableSizes:
    """Some sizes (ascending), of which the model may not be had at all: batch normalisation wants two rows,
    `Job.batch` may want multiples of eight."""

    def __init__(self, sizes: Sequence[int], model_at: ModelAt) -> None:
        self.sizes = sizes

        @cache
        def model_if_captured(size: int) -> ProfiledModel | None:
            try:
                return model_at(size)
            except CaptureError:
                return None

        self.model_at = model_if_captured

    def near(self, index: int) -> ProfiledModel | None:
        """The model at that size or, where it cannot be captured, at the next smaller one; None if there is
        none within reach."""
        places = range(index, max(index - REACH, -1), -1)
        return next(self.models(self.sizes[place] for place in places), None)

    def around(self, size: int) -> list[ProfiledModel]:
        """The model at two sizes to interpolate between, of several rows; at fewer if it cannot be captured
        at those that are tried."""
        tried = (size, size + 1, size - 1, size + 2, 2 * size, 3 * size, size // 2, size - size % 8)
        several = (number for number in dict.fromkeys(tried) if number > 1)
        return list(islice(self.models(several), 2))

    def models(self, sizes: Iterable[int]) -> Iterator[ProfiledModel]:
        """The model at those of some sizes at which it can be captured."""
        return (model for model in map(self.model_at, sizes) if model is not None)


def sizes_of(request: PlanRequest) -> Sequence[int]:
    """Sizes of micro-batches that a request may use, ascending. Raises: ConfigError if there is none."""
    if sizes := request.sizes():
        return sizes
    options = request.options
    raise ConfigError(
        f"{options.schedule} cannot divide a global batch of {options.global_batch} rows among its "
        "directions",
        hint="use an even number of rows",
    )


def largest_below(request: PlanRequest, upper: ProfiledModel, model_at: ModelAt) -> int | None:
    """The largest size below that of `upper` that has a plan; 0 if none was found.

    By interpolation between `upper` and a much smaller micro-batch; None if the model cannot be captured at
    any of those tried, or is of other ops there. One row is looked at as it is: models may do without some
    ops then.
    """
    quiet = request.for_advice
    capturable = CapturableSizes([size for size in request.sizes() if size < upper.size], model_at)

    several = [size for size in capturable.sizes if size > 1]
    if several:
        tried = (*several[:VERIFIED], 4, 8, upper.size // 2)
        lower = next(capturable.models(size for size in dict.fromkeys(tried) if 1 < size < upper.size), None)
        if lower is None or lower.graph.fingerprint != upper.graph.fingerprint:
            return None  # there is nothing to interpolate
        guess = largest_size(several, lambda size: quiet.fits(interpolate_sample(lower, upper, size)))
        near = [] if guess is None else [size for size in several if size <= guess][-REACH:]
        for model in islice(capturable.models(reversed(near)), VERIFIED):  # interpolation may be too bold
            if quiet.fits(model):
                return model.size
    one = capturable.model_at(1) if 1 in capturable.sizes else None
    return 1 if one is not None and quiet.fits(one) else 0


def largest_plan(request: PlanRequest, model_at: ModelAt) -> tuple[Plan, ProfiledModel]:
    """The plan with the largest micro-batches that fit, and the model at that size.

    request: its micro-batch size is where to look first.  model_at: captures and profiles.
    Sizes are judged by interpolation between two at which the model was captured, unless it has other ops at
    one of them; at the size that is found it is captured too, and at smaller ones until one fits. Sizes at
    which the model cannot be captured are passed over.
    Raises: InfeasibleError if not even the smallest size fits; ConfigError if no size divides the global
        batch; CaptureError if the model cannot be captured at those that were tried.
    """
    sizes = sizes_of(request)
    capturable = CapturableSizes(sizes, model_at)
    first = min(range(len(sizes)), key=lambda index: abs(sizes[index] - request.options.microbatch_size))
    ends = capturable.around(sizes[max(first, 1)]) if len(sizes) > 2 else []
    alike = len(ends) > 1 and ends[0].graph.fingerprint == ends[1].graph.fingerprint

    def fits(index: int) -> bool:
        model = capturable.near(index)
        return model is not None and request.fits(model)

    def seems_to_fit(index: int) -> bool:
        return request.fits(interpolate_sample(ends[0], ends[1], sizes[index])) if alike else fits(index)

    index = largest_size(range(len(sizes)), seems_to_fit, start=first) or 0
    while index > 0 and not fits(index):
        index -= 1
    # Interpolation may have been too careful: the next size is tried as it is.
    while index + 1 < len(sizes) and fits(index + 1):
        index += 1
    model = capturable.near(index) or next(iter(ends), None) or model_at(sizes[first])
    return plan_with_advice(request, model), model


MOST_VERIFIED = 3
"""Sizes that are captured and planned as they are, the best by interpolation first."""


def best_plan(request: PlanRequest, model_at: ModelAt) -> tuple[Plan, ProfiledModel]:
    """The plan with the fastest simulated step over all sizes that divide the global batch, and the model at
    that size; of equally fast ones the smallest.

    request: its micro-batch size is where to look first.  model_at: captures and profiles.
    Sizes are ranked by interpolation between two at which the model was captured, unless it has other ops at
    one of them; the first few are then captured themselves. Sizes at which the model cannot be captured, or
    that the schedule cannot run, are passed over.
    Raises: ConfigError without a global batch, or if no size divides it among the schedule's directions;
        InfeasibleError if no size fits; CaptureError if the model cannot be captured at any that was tried.
    """
    if request.options.global_batch is None:
        raise ConfigError(
            "the best micro-batch size is that of a number of rows per step, and there is none",
            hint="say how many rows a step has: --global-batch 64",
        )
    sizes = sizes_of(request)
    capturable = CapturableSizes(sizes, model_at)
    near = min(sizes, key=lambda size: abs(size - request.options.microbatch_size))
    ends = capturable.around(near) if len(sizes) > MOST_VERIFIED else []
    ranked = list(sizes)
    if len(ends) > 1 and ends[0].graph.fingerprint == ends[1].graph.fingerprint:
        guessed = {size: _step_s(request, interpolate_sample(ends[0], ends[1], size)) for size in sizes}
        ranked = sorted(
            (size for size in sizes if guessed[size] is not None), key=lambda size: guessed[size] or 0.0
        )
        ranked = ranked[:MOST_VERIFIED] or list(sizes)[:MOST_VERIFIED]
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
