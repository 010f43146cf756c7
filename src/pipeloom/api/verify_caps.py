"""Plans whose caps are verified before they are given out.

Planners weigh stages by a table of what each kind of op keeps and needs. Stages run as graphs that are traced
from them, and those have the last word: a rank whose stages pass its cap is refused. So the stages of a plan
are traced first, as ranks will trace theirs; where one passes its cap, planning goes on under a lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..ir.action import STEP
from ..ir.cluster import Cluster, Device, Link
from ..ir.costs import StageCost
from ..ir.errors import InfeasibleError
from ..ir.plan import Plan
from ..ir.units import format_bytes
from ..lowering.passes import lower
from ..planner.plan_costs import PlanCosts
from ..runtime.calibration.calibrate import graph_memory
from ..runtime.posted_channel import SMALL_BYTES
from ..simulator.simulate import simulate
from ..tracer.captured import Captured
from .rank_stages import make_variant

TRIES = 7
"""Plans that are made at most, all but the first under lower caps."""

FAR_BELOW = 0.25
"""Plans that hold no more than this share of each cap are not traced. Stages with ops that the table does not
know, such as `lstm`, were found to hold 2.5 times what was planned."""


def plan_within_caps(
    search: Callable[[Cluster], Plan], cluster: Cluster, traced_peaks: Callable[[Plan], Sequence[int]]
) -> Plan:
    """The first plan whose traced stages keep the devices' memory.

    search: plans under the memory of a cluster.  traced_peaks: bytes that each rank of a plan holds.
    Raises: as `search` under the true caps; InfeasibleError if no plan was found whose traced stages keep
        them.
    """
    caps = [device.memory_bytes for device in cluster.devices]
    lowered = list(caps)
    first: tuple[int, ...] = ()
    for _ in range(TRIES):
        devices = [replace(d, memory_bytes=cap) for d, cap in zip(cluster.devices, lowered, strict=True)]
        try:
            plan = search(replace(cluster, devices=tuple(devices)))
        except InfeasibleError:
            if not first:
                raise
            break
        plan = replace(plan, caps=tuple(caps[: len(plan.caps)]))
        far_below = all(peak <= FAR_BELOW * cap for peak, cap in zip(plan.peaks, plan.caps, strict=True))
        peaks = plan.peaks if far_below else tuple(traced_peaks(plan))
        first = first or peaks
        over = [rank for rank, size in enumerate(peaks) if size > caps[rank]]
        if not over:
            return plan
        for rank in over:
            unseen = peaks[rank] - plan.peaks[rank]
            lowered[rank] = max(1, min(lowered[rank] - 1, caps[rank] - unseen))
    rank, most = max(enumerate(first), key=lambda pair: pair[1] - caps[pair[0]])
    raise InfeasibleError(
        f"as planned, all fits, but rank {rank} holds {format_bytes(most)} when its stage is traced, and its "
        f"device's cap is {format_bytes(caps[rank])}; planning for less found no plan that keeps it"
    )


def traced_peaks(
    plan: Plan, captured: Captured, costs: PlanCosts, *, compiled: bool = False
) -> tuple[int, ...]:
    """Bytes that each rank holds at its peak, by the graphs of its stages, as `Forecast.untimed` says before
    they run. The plan has caps.

    compiled: by the graphs that are compiled, whose backwards return the gradients of parameters.
    """
    stages = plan.stage_graph(captured.graph)
    every = range(len(plan.stages))
    variant = make_variant(captured, plan, stages, every, device="cpu", compiled=compiled, policy=plan.memory)
    traced = [graph_memory(variant.functions[s], stages) for s in every] * plan.replicas
    step = simulate(
        lower(plan.as_schedule, variant.stages, policy=plan.memory, updates=plan.updates, clips=plan.clips),
        variant.stages,
        tuple(_completed(graphs, cost) for graphs, cost in zip(traced, costs.stages(plan), strict=True)),
        Cluster(
            devices=tuple(Device(name="cpu", memory_bytes=cap) for cap in plan.caps),
            within_node=Link(bandwidth_bytes_per_s=1e15),
        ),
        caps=plan.caps,
        small_bytes=SMALL_BYTES,
    )
    return tuple(step.peak_bytes(rank) for rank in range(len(plan.caps)))


def _completed(graphs: StageCost, planned: StageCost) -> StageCost:
    """What is said of a stage's graphs, with what planners know as well: parameters, batch and the like."""
    step_bytes = planned.transient_bytes.get(STEP, 0)
    return replace(
        graphs,
        static_bytes=planned.static_bytes,
        tied_bytes=planned.tied_bytes,
        for_owners=planned.for_owners,
        transient_bytes={**graphs.transient_bytes, STEP: step_bytes},
    )
