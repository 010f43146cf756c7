"""The passes before training, joined: capture, profile, plan, simulate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.errors import PlanError
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..ir.timeline import Timeline
from ..ir.units import parse_bytes
from ..planner import PlanOptions, cpu_cluster, make_plan
from ..profiler.roofline import roofline
from .placing import plan_placed, simulate_plan

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from ..tracer.captured import Captured
    from ..tracer.job import Job


def capture(
    job: Job,
    microbatch_size: int,
    *,
    batch: Mapping[str, Tensor] | None = None,
    autocast: dtype | None = None,
) -> Captured:
    """Turn a job's model and loss into an OpGraph and what can be run; see `tracer.capture`.

    microbatch_size: rows per micro-batch.  batch: a micro-batch to take the shapes from instead.
    """
    from ..tracer.capture import capture as trace

    return trace(job, microbatch_size, batch=batch, autocast=autocast)


def profile(captured: Captured, *, device: str = "cpu") -> Profile:
    """Measure every op of a captured model on this machine's `device` ("cpu" or "cuda")."""
    if captured.graph.fallback:
        from ..profiler.modules import measure_modules

        return measure_modules(captured, device=device)
    from ..profiler.measure import measure

    return measure(captured, device=device)


def estimate(graph: OpGraph, cluster: Cluster) -> dict[str, Profile]:
    """Profiles by roofline for every kind of device of a cluster, which need not be there."""
    return {d.name: roofline(graph, d) for d in cluster.devices}


def plan(
    job: Job, *, stages: int, microbatches: int, microbatch_size: int, schedule: str = "1f1b",
    split_backward: bool = False, memory: str | int | None = None, cluster: Cluster | None = None,
    strategy: str = "exact", captured: Captured | None = None, profiled: Profile | None = None,
) -> Plan:  # fmt: skip
    """The plan for a job on this machine, or on a cluster described by figures.

    stages: one per device; where the schedule wants several on each, or replicas, the number of devices.
    microbatches: per step.  memory: cap per device, such as "300MiB";
    it wins over the cluster's, and without either the plan has no caps.
    cluster: plan for these devices by roofline instead of measuring here.
    captured, profiled: results of `capture` and `profile`, if they are at hand.

    Raises: CaptureError, PlanError; InfeasibleError if nothing fits under the caps.
    """
    from ..runtime.calibrate import optimizer_ratio

    captured = captured or capture(job, microbatch_size)
    costs: Profile | dict[str, Profile]
    described = cluster is not None
    if cluster is None:
        cluster = cpu_cluster(stages, memory=memory)
        costs = profiled or profile(captured)
    else:
        if memory is not None:
            size = parse_bytes(memory)
            cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=size) for d in cluster.devices))
        costs = profiled or estimate(captured.graph, cluster)
    options = PlanOptions(optimizer_bytes=optimizer_ratio(job.optimizer), split_backward=split_backward)
    if schedules.entry(schedule).place == "line":
        found = make_plan(
            captured.graph, costs, cluster, stages=stages, schedule=schedule,
            microbatches=microbatches, strategy=strategy, options=options,
        )  # fmt: skip
    else:
        found = plan_placed(
            captured.graph, costs, cluster, ranks=stages, schedule=schedule,
            microbatches=microbatches, strategy=strategy, options=options,
        )  # fmt: skip
    caps = found.caps if described or memory is not None else ()
    return replace(found, microbatch_size=microbatch_size, caps=caps)


def simulate(
    plan: Plan, graph: OpGraph, costs: Profile | Mapping[str, Profile], cluster: Cluster
) -> Timeline:
    """Predict a step of a plan from a profile. Needs neither torch nor the model.

    costs: one profile for all devices, or by device name.
    Raises: PlanError if plan, graph, profile and cluster do not belong together.
    """
    plan.stage_graph(graph)  # refuses a plan of another model
    profiles = [costs] if isinstance(costs, Profile) else list(costs.values())
    for given in profiles:
        if given.graph != plan.graph:
            raise PlanError(
                f"the profile was made for model {given.graph}, the plan for {plan.graph}",
                hint="profile the plan's model",
            )
    return simulate_plan(plan, graph, costs, cluster)
