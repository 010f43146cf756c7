"""Plans for several pipelines side by side: one is planned, on every W-th device; others are like it."""

from __future__ import annotations

from dataclasses import replace

from ..ir.cluster import Cluster
from ..ir.errors import ConfigError, InfeasibleError, PlanError
from ..ir.plan import Plan
from ..ir.replicas import widened
from ..ir.units import format_bytes
from ..planner.plan_costs import PlanCosts
from ..schedules import registry


def refuse_width(schedule: str, stages: int, width: int, cluster: Cluster) -> None:
    """Raises: ConfigError if there is no such width, or there are not enough devices; PlanError if the
    schedule has replicas of its own."""
    if width < 1:
        raise ConfigError(f"a width of {width}", hint="use at least 1")
    if width == 1:
        return
    shape, _ = registry.default_placement(schedule, stages)
    if shape.replicas > 1:
        raise PlanError(
            f"schedule {schedule} holds every stage on {shape.replicas} ranks by itself, so it cannot have "
            f"{width} replicas of each beside",
            hint="leave out --width, or choose a schedule of one direction, such as 1f1b",
        )
    if stages * width > len(cluster.devices):
        raise PlanError(
            f"{width} replicas of {stages} stages are for {stages * width} devices, there are "
            f"{len(cluster.devices)}",
            hint="use a smaller --width or fewer stages, or add devices",
        )


def refuse_sharding(schedule: str, stages: int, width: int) -> None:
    """Raises: ConfigError if there are no replicas that could share out the optimizer's state."""
    if width * registry.default_placement(schedule, stages)[0].replicas == 1:
        raise ConfigError(
            "the optimizer's state is to be shared out, but every stage has one replica",
            hint="add --width 2, or leave out --shard-optimizer",
        )


def share_of(microbatches: int, width: int) -> int:
    """The micro-batches of each of several pipelines. Raises: ConfigError if they cannot be shared evenly.

    >>> share_of(8, 2)
    4
    """
    count, rest = divmod(microbatches, width)
    if rest or not count:
        near = max(1, round(microbatches / width)) * width
        raise ConfigError(
            f"{microbatches} micro-batches per step cannot be shared evenly by {width} replicas",
            hint=f"use a multiple of {width}, such as {near}",
        )
    return count


def first_of_each(cluster: Cluster, width: int) -> Cluster:
    """The devices of one of so many pipelines: every W-th, with the memory that all W replicas of its stage
    have."""
    groups = [
        cluster.devices[at : at + width] for at in range(0, len(cluster.devices) // width * width, width)
    ]
    smallest = (min(device.memory_bytes for device in group) for group in groups)
    devices = [replace(group[0], memory_bytes=size) for group, size in zip(groups, smallest, strict=True)]
    return replace(cluster, devices=tuple(devices))


def plan_side_by_side(plan: Plan, width: int, costs: PlanCosts, cluster: Cluster) -> Plan:
    """Several pipelines like that of a plan, their step simulated with the sums of their gradients.

    Raises: InfeasibleError if a rank then holds more than its device has.
    """
    wide = widened(plan, width)
    caps = tuple(device.memory_bytes for device in cluster.devices[: len(wide.schedule_rows)])
    step = costs.simulate(replace(wide, caps=caps))
    peaks = tuple(step.peak_bytes(rank) for rank in range(len(caps)))
    for rank, (peak, cap) in enumerate(zip(peaks, caps, strict=True)):
        if peak > cap:
            raise InfeasibleError(
                f"rank {rank} needs {format_bytes(peak)} as one of {width} replicas, its cap is "
                f"{format_bytes(cap)}"
            )
    return replace(wide, caps=caps, peaks=peaks, predicted_step_s=step.step_s)
