"""Times for schedules without a model at hand: given as numbers, or taken from a plan or profile file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ..ir import json_codec
from ..ir.costs import StageCost
from ..ir.errors import ConfigError
from ..ir.graph import Value
from ..ir.plan import Plan, load_plan
from ..ir.profile import Profile
from ..ir.stages import StageGraph
from ..schedules import registry
from .edges import between, seconds_by_edge

Seconds: TypeAlias = float | tuple[float, ...]
"""One number: of one micro-batch on all stages of a rank together. Several: on pieces of the model from front
to back, one per stage, or fewer, each then cut into the same number of equal stages."""

UNIT = 1 << 44
"""Bytes that the residuals of one micro-batch take on a rank where nothing is known: large, so that
messages, whose sizes stand for their times, are nothing against it."""

LONGEST = 1 << 24
"""Bytes of the message that takes longest; the others are in proportion."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """What one micro-batch takes. residual_bytes: per piece of the model, if known."""

    forward_s: Seconds = 1.0
    input_grad_s: Seconds = 1.0
    weight_grad_s: Seconds = 1.0
    residual_bytes: tuple[float, ...] = ()


def load_work(path: Path, ranks: int) -> MicrobatchTimes:
    """Times of a saved plan, stage by stage; or of a saved profile, spread evenly over the ranks.

    Raises: ConfigError if the file is missing or is neither.
    """
    try:
        plan = load_plan(path)
    except ConfigError as no_plan:
        try:
            profile = json_codec.load(path, Profile)
        except ConfigError:
            if "valid" not in no_plan.message:
                raise no_plan from None
            raise ConfigError(
                f"{path} is neither a plan nor a profile of pipeloom",
                hint="write one with `pipeloom plan MODEL -o FILE` or `pipeloom profile MODEL --save FILE`",
            ) from None
        costs = profile.costs.values()
        return MicrobatchTimes(
            forward_s=sum(c.forward_s for c in costs) / ranks,
            input_grad_s=sum(c.input_grad_s for c in costs) / ranks,
            weight_grad_s=sum(c.weight_grad_s for c in costs) / ranks,
        )
    return _work_of_plan(plan)


def _work_of_plan(plan: Plan) -> MicrobatchTimes:
    in_flight = registry.in_flight(plan.as_schedule)
    residuals = [s.memory.residuals / max(count, 1) for s, count in zip(plan.stages, in_flight, strict=False)]
    return MicrobatchTimes(
        forward_s=tuple(s.forward_s for s in plan.stages),
        input_grad_s=tuple(s.input_grad_s for s in plan.stages),
        weight_grad_s=tuple(s.weight_grad_s for s in plan.stages),
        residual_bytes=tuple(residuals) if any(residuals) else (),
    )


def stage_costs(
    times: MicrobatchTimes, stages: int, ranks: float, *, slices: int = 1
) -> tuple[StageCost, ...]:
    """One cost per stage, for an action on one of the `slices` of a micro-batch.

    Residuals are held until W: what I frees is not known without a model.

    Raises: ConfigError if the numbers of a list do not fit the stages.

    >>> [c.forward_s for c in stage_costs(MicrobatchTimes(forward_s=(1.0, 3.0)), 4, 2)]
    [0.5, 0.5, 1.5, 1.5]
    """
    f, i, w = (
        per_stage(seconds, stages, ranks, name)
        for seconds, name in (
            (times.forward_s, "F"),
            (times.input_grad_s, "I"),
            (times.weight_grad_s, "W"),
        )
    )
    held_bytes = per_stage(times.residual_bytes or float(UNIT), stages, ranks, "residuals")
    return tuple(
        StageCost(
            forward_s=f[s] / slices,
            input_grad_s=i[s] / slices,
            weight_grad_s=w[s] / slices,
            backward_s=(i[s] + w[s]) / slices,
            residual_bytes=round(held_bytes[s] / slices),
            carried_bytes=round(held_bytes[s] / slices),
        )
        for s in range(stages)
    )


def per_stage(amount: Seconds, stages: int, ranks: float, name: str) -> list[float]:
    """The part of each stage. Raises: ConfigError if a list does not fit."""
    if not isinstance(amount, tuple):
        return [amount * ranks / stages] * stages
    if len(amount) > stages or stages % len(amount):
        raise ConfigError(
            f"{name} has {len(amount)} times for {stages} stages",
            hint=f"give one time for all ranks, or one per stage: {stages}, or a number that divides it",
        )
    share = len(amount) / stages
    return [amount[s * len(amount) // stages] * share for s in range(stages)]


def with_transfers(stages: StageGraph, transfer_s: tuple[float, ...]) -> tuple[StageGraph, float]:
    """Stages with `transfer_s[i]` seconds along the i-th edge and back: in a chain from stage i to i + 1.

    Returns: the stages with messages of fitting sizes, and the bandwidth in bytes per second.
    Raises: ConfigError unless there is one time per boundary.
    """
    count = len(between(stages))
    if len(transfer_s) != count:
        raise ConfigError(
            f"-T has {len(transfer_s)} times for the {count} boundaries between {stages.cuts} stages",
            hint="give one time for all messages, or one per boundary",
        )
    longest_s = max(transfer_s, default=0.0)
    if longest_s == 0:
        return stages, float("inf")

    seconds = seconds_by_edge(stages, transfer_s)

    def sized(value: Value, edge: tuple[int, int]) -> Value:
        return replace(value, shape=(round(LONGEST * seconds[edge] / longest_s / 4),))

    crossings = tuple(replace(c, value=sized(c.value, (c.source, c.target))) for c in stages.crossings)
    return replace(stages, crossings=crossings), LONGEST / longest_s
