"""Where the stages of a plan go, in schedules that want several of them on a rank, or replicas.

The model is cut as if every stage had a device of its own with an equal share of its rank's memory; then the
stages are placed, and the schedule is built for the times that they take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.schedule import Schedule
from ..ir.steady import SteadyStep
from ..ir.units import format_bytes
from ..planner import NoCutFits, Readers, TooManyStages
from .plan_costs import PlanCosts


def stages_for(schedule: str, ranks: int) -> int:
    """Into how many stages a model is cut for a schedule in its usual placement.

    Raises: ScheduleError if one of them is to span several ranks.

    >>> stages_for("1f1b", 4), stages_for("zb_v", 4), stages_for("dualpipe", 4)
    (4, 8, 4)
    """
    shape, placement = schedules.default_placement(schedule, ranks)
    if shape.shards:
        both = " and ".join(str(placement[s]) for s in shape.shards[0])
        raise ScheduleError(
            f"schedule {schedule} cannot be run: its stage {shape.shards[0][0]} spans ranks {both}, and the "
            "runtime runs a stage on one rank",
            hint="it can be checked, simulated and drawn; to run, place each stage on one rank",
        )
    return len(placement) // shape.replicas


def place(
    plan: Plan,
    graph: OpGraph,
    schedule: str,
    ranks: int,
    *,
    times: schedules.Times | None = None,
    split_backward: bool = False,
) -> Plan:
    """The same stages on `ranks` ranks, in the usual placement of another schedule.

    times: of the stages, for schedules that order by time; equal ones by default.
    split_backward: also where the schedule does not by itself.
    Raises: PlanError if the stages or the micro-batches of the plan are not as many as the schedule needs.
    """
    shape, placement = schedules.default_placement(schedule, ranks)
    needed = len(placement) // shape.replicas
    if len(plan.stages) != needed:
        raise PlanError(
            f"{schedule} on {ranks} ranks is for {needed} stages, the plan has {len(plan.stages)}",
            hint=f"plan {needed} stages",
        )
    if plan.microbatches % shape.replicas:
        raise PlanError(
            f"{schedule} runs in {shape.replicas} directions, there are {plan.microbatches} micro-batches",
            hint=f"use a multiple of {shape.replicas}",
        )
    placed = replace(plan, placement=placement, caps=())
    stages = placed.replicated(placed.stage_graph(graph))
    count = plan.microbatches // shape.replicas
    if plan.updates is not None:
        rows: Schedule | SteadyStep = schedules.build_steady(
            schedule,
            stages,
            placement,
            replace(plan.updates, every=count),
            times=times,
            split_backward=split_backward,
        )
    else:
        rows = schedules.build(schedule, stages, placement, count, times=times, split_backward=split_backward)
    return replace(placed, schedule=rows.name, schedule_rows=tuple(str(rows).splitlines()))


def plan_placed(
    cut: Callable[[Cluster, int], Plan],
    costs: PlanCosts,
    cluster: Cluster,
    *,
    schedule: str,
    ranks: int,
    split_backward: bool,
    weights: str,
) -> Plan:
    """Cut, place and build.

    cut: plans so many stages in a line, one on each device of a cluster, with a flush.  cluster: whose memory
        is the limit.  weights: how they are updated.
    Raises: InfeasibleError if a rank needs more than its device has, as simulated.
    """
    graph = costs.graph
    stages = stages_for(schedule, ranks)
    if stages > (ops := sum(not op.cheap for op in graph.ops)):
        places = len(Readers(graph).cut_points) - 1
        raise _too_many(f"{stages} stages, the model has {ops} ops", places, schedule, ranks, cluster)
    try:
        line = cut(_one_device_each(cluster, schedule, ranks), stages)
    except TooManyStages as error:
        raise _too_many(error.message, error.places, schedule, ranks, cluster) from None
    except InfeasibleError as error:
        share = len(schedules.default_placement(schedule, ranks)[1]) // ranks
        message = (
            f"{schedule} puts {share} stages on each rank, each with 1/{share} of its device's memory. "
            f"Of that share: {error.message}"
        )
        raise NoCutFits(message, share=error.share if isinstance(error, NoCutFits) else 0.0) from None

    line = replace(line, weights=weights)
    even = place(line, graph, schedule, ranks, split_backward=split_backward)
    times = schedules.Times(costs=costs.stages(even))
    placed = place(line, graph, schedule, ranks, times=times, split_backward=split_backward)
    caps = tuple(device.memory_bytes for device in cluster.devices[:ranks])
    step = costs.simulate(replace(placed, caps=caps))
    for rank, cap in enumerate(caps):
        if (need := step.peak_bytes(rank)) > cap:
            raise InfeasibleError(
                f"rank {rank} needs {format_bytes(need)} for {schedule}, its cap is {format_bytes(cap)}"
            )
    peaks = tuple(step.peak_bytes(rank) for rank in range(ranks))
    return replace(placed, caps=caps, peaks=peaks, predicted_step_s=step.step_s, notes={})


def _too_many(why: str, places: int, schedule: str, ranks: int, cluster: Cluster) -> PlanError:
    """The error where a schedule wants more stages than a model can be cut into.

    why: begins with how many it wants.  places: how many there can be.
    """
    most = min(ranks - 1, places, len(cluster.devices))
    fewer = next((n for n in range(most, 0, -1) if stages_for(schedule, n) <= places), None)
    return PlanError(
        f"{schedule} on {ranks} ranks is for {why}",
        hint=f"use at most {fewer} {'ranks' if fewer > 1 else 'rank'} (--stages {fewer})"
        if fewer
        else "use another schedule",
    )


def _one_device_each(cluster: Cluster, schedule: str, ranks: int) -> Cluster:
    if ranks > len(cluster.devices):
        raise PlanError(
            f"{ranks} ranks for {len(cluster.devices)} devices", hint="use fewer ranks, or add devices"
        )
    shape, placement = schedules.default_placement(schedule, ranks)
    shares = []
    for rank in placement[: len(placement) // shape.replicas]:
        device = cluster.devices[rank]
        shares.append(replace(device, memory_bytes=max(1, device.memory_bytes // placement.count(rank))))
    return replace(cluster, devices=tuple(shares))
