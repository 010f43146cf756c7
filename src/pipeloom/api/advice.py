"""What to do where no plan fits. Each piece of advice was followed before it is given, and led to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from typing import TYPE_CHECKING

from .. import schedules
from ..ir.cluster import MOST_BYTES, Cluster, Device
from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.memory_policy import Treatment
from ..ir.plan import Plan
from ..ir.units import enough_bytes, parse_bytes
from ..planner import NoCutFits, planner

if TYPE_CHECKING:
    from ..tracer import Captured
    from .plan_request import Costs, Planning

MARGINS = (1.0, 1.01, 1.03, 1.1, 1.25, 1.6, 2.0, 3.0, 4.0)
"""What is tried of the caps that fit by estimate: a simulated schedule may hold more than that, and where
stages share a device, each has an equal part of it, however unequal they are."""

NEARLY = 1.25
"""Where only a larger one does, the least between it and the one before is sought."""

CLOSELY = 1.02
"""Up to this ratio the least memory is sought between one that does and one that does not."""

MORE_STAGES = (1, 2, 3, 4, 6)
"""Stages beyond those asked for that are tried where no search says how many."""

LIMIT_S = 60.0
"""Once so long was tried, only what is cheap to say is said."""

REFINED_S = 15.0
"""So long the least memory is made smaller: other advice wants its time, too."""

WAYS: dict[tuple[Treatment, ...], str] = {
    ("recompute",): "let residuals be recomputed (--treat recompute)",
    ("recompute", "offload"): "let residuals be recomputed or offloaded (--treat both)",
}
FREES = "dawnpiper"
"""A planner that frees memory, and the fastest of those to ask."""

SMALL = 200
"""Ops of a graph up to which the planner that was asked is asked again about treatments."""


@dataclass(frozen=True)
class Attempts:
    """The request that failed, to be tried again with something changed."""

    planning: Planning
    graph: OpGraph
    costs: Costs
    size: int
    captured: Captured | None = None
    begin_s: float = field(default_factory=time.monotonic)

    def plan(self, other: Planning) -> Plan | None:
        """The plan of a changed request; None if there is none either."""
        try:
            any_plan = replace(other, options=replace(other.options, fastest=False))
            return any_plan.plan(self.graph, self.costs, self.size, explained=False, captured=self.captured)
        except (PlanError, ScheduleError):
            return None

    def holds(self, other: Planning) -> bool:
        """Whether a changed request has a plan; taken for a no where finding out would take long."""
        return self.within(LIMIT_S) and self.plan(other) is not None

    def within(self, seconds: float) -> bool:
        """Whether less time than that was taken so far."""
        return time.monotonic() - self.begin_s < seconds


def advised(
    attempts: Attempts, error: InfeasibleError, largest: Callable[[], int | None] | None
) -> InfeasibleError:
    """The error with what helps: more memory, more stages, freeing memory, smaller micro-batches.

    error: of the request as it is.  largest: the largest micro-batch size with a plan, 0 if none, None if
        unknown.
    """
    hints = [*_memory(attempts, error), *_stages(attempts, error), *_freeing(attempts)]
    if size := largest() if largest is not None else None:
        hints.append(f"use micro-batches of {'1 row' if size == 1 else f'at most {size} rows'}")
    return InfeasibleError(error.message, hint=", or ".join(hints) or None)


def _memory(attempts: Attempts, error: InfeasibleError) -> Iterator[str]:
    """The least memory of each device: of what the search found, or else of a plan made without caps."""
    planning = attempts.planning
    caps = [device.memory_bytes for device in planning.cluster.devices[: planning.stages]]
    least: list[float] = [cap * error.share for cap in caps] if isinstance(error, NoCutFits) else []
    if not any(least):
        free = attempts.plan(replace(planning, cluster=_given(planning.cluster, planning.stages, [1 << 60])))
        peaks = () if free is None else free.peaks
        least = [max(pair) for pair in zip(caps, peaks, strict=False)]
        if len(set(caps)) == 1:
            least = [max(least, default=0)] * len(least)
    wanted = _enough(attempts, least) if least else None
    if wanted is not None:
        yield _said(wanted, planning.cluster, planning.stages)


def _enough(attempts: Attempts, least: Sequence[float]) -> Cluster | None:
    """The cluster with as much memory as it takes; None if that was not found out.

    least: of each device what fits by estimate. Unequal devices get as much as that asks for only where it
    does not do to leave none of them with less than some size.
    """
    planning = attempts.planning
    caps = [device.memory_bytes for device in planning.cluster.devices[: planning.stages]]

    def scaled(margin: float) -> Cluster:
        return _given(planning.cluster, planning.stages, [ceil(size * margin) for size in least])

    def filled(size: float) -> Cluster:
        return _given(planning.cluster, planning.stages, [ceil(size)])

    def holds(cluster: Cluster) -> bool:
        return attempts.holds(replace(planning, cluster=cluster))

    def least_of(made: Callable[[float], Cluster], low: float, high: float, known: Cluster) -> Cluster:
        """The cluster of the smallest number that does, nearly; the known one if no other is found."""
        while high > low * CLOSELY and attempts.within(REFINED_S):
            middle = sqrt(low * high)
            if holds(cluster := made(middle)):
                known, high = cluster, middle
            else:
                low = middle
        return known

    margin = next((margin for margin in MARGINS if holds(scaled(margin))), None)
    if margin is None:
        return None
    wanted = scaled(margin)
    if margin > NEARLY:
        before = max(smaller for smaller in MARGINS if smaller < margin)
        wanted = least_of(scaled, before, margin, wanted)
    if len(set(caps)) == 1:
        return wanted
    most = max(device.memory_bytes for device in wanted.devices[: planning.stages])
    return least_of(filled, min(caps), most, wanted)


def _given(cluster: Cluster, stages: int, sizes: list[int]) -> Cluster:
    """The cluster with at least these sizes, of the first devices, as they would be typed; one size: for
    all."""
    sizes = [parse_bytes(enough_bytes(size)) for size in sizes]
    each = sizes * stages if len(sizes) == 1 else sizes
    own = tuple(
        replace(device, memory_bytes=min(MOST_BYTES, max(device.memory_bytes, size)))
        for device, size in zip(cluster.devices, each, strict=False)
    )
    return replace(cluster, devices=own + cluster.devices[len(own) :])


def _said(wanted: Cluster, cluster: Cluster, stages: int) -> str:
    """What the devices of a cluster need to be as wanted. Those that are is not said.

    >>> from pipeloom.planner import find_cluster
    >>> two, three = find_cluster("2 x a100-40"), find_cluster("a100-40 with 3GiB + 2 x v100-32 with 1GiB")
    >>> _said(_given(two, 2, [50 << 30]), two, 2)
    'give each device at least 50.0 GiB'
    >>> _said(_given(three, 3, [4 << 30, 2 << 30, 2 << 30]), three, 3)
    'give a100-40-sxm at least 4.00 GiB and v100-32-sxm at least 2.00 GiB'
    >>> _said(_given(three, 3, [3 << 30, 2 << 30, 2 << 30]), three, 3)
    'give v100-32-sxm at least 2.00 GiB'
    """
    more = {
        rank: (device.name, enough_bytes(device.memory_bytes))
        for rank, (device, own) in enumerate(zip(wanted.devices[:stages], cluster.devices, strict=False))
        if device.memory_bytes > own.memory_bytes
    }
    sizes = list(dict.fromkeys(more.values()))
    if len(more) == stages and len({size for _, size in sizes}) == 1:
        return f"give each device at least {sizes[0][1]}"
    others = {device.name for rank, device in enumerate(cluster.devices[:stages]) if rank not in more}
    if len({name for name, _ in sizes}) < len(sizes) or others & {name for name, _ in sizes}:
        sizes = [(f"device {rank}", size) for rank, (_, size) in more.items()]  # of one name, and different
    return "give " + " and ".join(f"{name} at least {size}" for name, size in sizes)


def _stages(attempts: Attempts, error: InfeasibleError) -> Iterator[str]:
    """The smallest number of stages that was found to do, on devices like these."""
    planning = attempts.planning
    first = planning.cluster.devices[0]
    if any(device != first for device in planning.cluster.devices):
        return
    known = error.stages if isinstance(error, NoCutFits) else None
    guesses = [known, known + 1] if known else [planning.stages + more for more in MORE_STAGES]
    for stages in guesses if known or not isinstance(error, NoCutFits) else ():
        devices = _as_many(planning, stages)
        wider = replace(planning, stages=stages, cluster=replace(planning.cluster, devices=devices))
        if attempts.holds(wider):
            yield _said_stages(planning, stages)
            return


def _as_many(planning: Planning, stages: int) -> tuple[Device, ...]:
    """At least so many devices like those of a cluster; of this machine's, each then has a smaller share."""
    devices = planning.cluster.devices
    if not planning.local:
        return devices + devices[:1] * (stages - len(devices))
    first = devices[0]
    disk = first.host_memory_bytes * len(devices) // stages
    memory = first.memory_bytes if planning.capped else first.memory_bytes * len(devices) // stages
    return (replace(first, memory_bytes=max(1, memory), host_memory_bytes=disk),) * stages


def _said_stages(planning: Planning, stages: int) -> str:
    """The advice to use more stages, in ranks where the schedule puts several on each. Processes of this
    machine are there; other devices may have to be found."""
    line = schedules.entry(planning.schedule).place == "line"
    flag = f" (--stages {stages})" if planning.local or not line else ""
    there = planning.local or stages <= len(planning.cluster.devices)
    return f"use {stages} {'stages' if line else 'ranks'}{flag}{'' if there else f' on {stages} devices'}"


def _freeing(attempts: Attempts) -> Iterator[str]:
    """What else may be done with residuals, or a planner that frees memory."""
    planning = attempts.planning
    known = planner(planning.strategy)
    if known.optimises == "never":
        if attempts.holds(replace(planning, strategy=FREES)):
            yield f"use planner {FREES}, which frees memory"
        return
    linked = all(device.host_link is not None for device in planning.cluster.devices)
    asked: tuple[str, ...] = () if known.optimises == "asked" else ("recompute", "offload")
    if planning.options.treatments is not None:
        asked = planning.options.treatments
    # Of large graphs the fast one is asked: what it finds, the slow one finds too.
    strategy = planning.strategy if len(attempts.graph.ops) <= SMALL else FREES
    for ways, said in WAYS.items():
        if not set(ways) > set(asked) or ("offload" in ways and not linked):
            continue
        options = replace(planning.options, treatments=ways)
        if attempts.holds(replace(planning, options=options, strategy=strategy)):
            yield said
            return
