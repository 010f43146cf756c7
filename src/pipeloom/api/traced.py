"""What the stages of a plan hold by their own graphs, traced here as ranks will trace theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.action import STEP
from ..ir.cluster import Cluster, Device, Link
from ..ir.costs import StageCost
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..lowering import lower
from ..runtime import SMALL_BYTES, graph_memory
from ..simulator import simulate
from ..tracer import Captured
from .plan_costs import costs_of
from .variants import make_variant


def traced_peaks(
    plan: Plan, captured: Captured, costs: Profile | Mapping[str, Profile], cluster: Cluster
) -> tuple[int, ...]:
    """Bytes that each rank holds at its peak, by the graphs of its stages, as `Forecast.untimed` says before
    they run. The plan has caps."""
    stages = plan.stage_graph(captured.graph)
    own = range(len(plan.stages))
    variant = make_variant(captured, plan, stages, own, device="cpu", policy=plan.memory)
    traced = [graph_memory(variant.functions[s], stages) for s in own] * plan.replicas
    planned = costs_of(plan, captured.graph, costs, cluster)
    step = simulate(
        lower(plan.as_schedule, variant.stages, policy=plan.memory),
        variant.stages,
        tuple(_completed(graphs, other) for graphs, other in zip(traced, planned, strict=True)),
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
        transient_bytes={**graphs.transient_bytes, STEP: step_bytes},
    )
