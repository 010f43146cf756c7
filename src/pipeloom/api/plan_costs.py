"""Plans for schedules that want several stages per rank, or replicas of them.

The model is cut as if every stage had a device of its own with an equal share of its rank's memory; then the
stages are placed, and the schedule is built for the times that they take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.costs import StageCost
from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..ir.stages import StageGraph
from ..ir.timeline import Timeline
from ..ir.units import format_bytes
from ..lowering import lower
from ..planner import (
    CostModel,
    CostOptions,
    NoCutFits,
    PlanOptions,
    TooManyStages,
    Wiring,
    make_plan,
    profile_of,
    refuse_other_weights,
    stage_costs,
    stage_plan,
)
from ..simulator import simulate

Costs = Profile | Mapping[str, Profile]
"""One profile for all devices, or by device name."""


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
    wanted = len(placement) // shape.replicas
    if len(plan.stages) != wanted:
        raise PlanError(
            f"{schedule} on {ranks} ranks is for {wanted} stages, the plan has {len(plan.stages)}",
            hint=f"plan {wanted} stages",
        )
    if plan.microbatches % shape.replicas:
        raise PlanError(
            f"{schedule} runs in {shape.replicas} directions, there are {plan.microbatches} micro-batches",
            hint=f"use a multiple of {shape.replicas}",
        )
    placed = replace(plan, placement=placement, caps=())
    stages = placed.replicated(placed.stage_graph(graph))
    count = plan.microbatches // shape.replicas
    made = schedules.build(schedule, stages, placement, count, times=times, split_backward=split_backward)
    return replace(placed, schedule=made.name, schedule_rows=tuple(str(made).splitlines()))


def plan_placed(
    graph: OpGraph,
    costs: Costs,
    cluster: Cluster,
    *,
    ranks: int,
    schedule: str,
    microbatches: int,
    strategy: str,
    options: PlanOptions,
    explained: bool = True,
    watch: Callable[[int], None] | None = None,
) -> Plan:
    """Cut, place and build. explained, watch: see `make_plan`.

    Raises: InfeasibleError if a rank needs more than its device has, as simulated.
    """
    own = schedules.entry(schedule).weights
    refuse_other_weights(schedule, options.weights or own)
    stages = stages_for(schedule, ranks)
    if stages > (ops := sum(not op.cheap for op in graph.ops)):
        places = len(Wiring(graph).cut_points) - 1
        raise _too_many(f"{stages} stages, the model has {ops} ops", places, schedule, ranks, cluster)
    try:
        apart = make_plan(
            graph,
            costs,
            _one_device_each(cluster, schedule, ranks),
            stages=stages,
            schedule="1f1b",
            microbatches=microbatches,
            strategy=strategy,
            options=replace(options, weights=own),
            explained=explained,
            watch=watch,
        )
    except TooManyStages as error:
        raise _too_many(error.message, error.places, schedule, ranks, cluster) from None
    except InfeasibleError as error:
        share = len(schedules.default_placement(schedule, ranks)[1]) // ranks
        message = (
            f"{schedule} puts {share} stages on each rank, each with 1/{share} of its device's memory. "
            f"Of that share: {error.message}"
        )
        raise NoCutFits(message, share=error.share if isinstance(error, NoCutFits) else 0.0) from None

    def placed(times: schedules.Times | None) -> Plan:
        return place(apart, graph, schedule, ranks, times=times, split_backward=options.split_backward)

    each = costs_of(placed(None), graph, costs, cluster)
    found = placed(schedules.Times(costs=each))
    caps = tuple(device.memory_bytes for device in cluster.devices[:ranks])
    step = simulate_plan(replace(found, caps=caps), graph, costs, cluster)
    for rank, cap in enumerate(caps):
        if (need := step.peak_bytes(rank)) > cap:
            raise InfeasibleError(
                f"rank {rank} needs {format_bytes(need)} for {schedule}, its cap is {format_bytes(cap)}"
            )
    peaks = tuple(step.peak_bytes(rank) for rank in range(ranks))
    return replace(found, caps=caps, peaks=peaks, predicted_step_s=step.step_s, notes={})


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


def costs_of(plan: Plan, graph: OpGraph, costs: Costs, cluster: Cluster) -> tuple[StageCost, ...]:
    """What each stage of a plan, replicas included, takes on the device of its rank.

    Raises: PlanError if the cluster has too few devices, or one without a profile.
    """
    if (ranks := max(plan.placement) + 1) > len(cluster.devices):
        raise PlanError(
            f"the plan is for {ranks} devices, the cluster has {len(cluster.devices)}",
            hint="name a cluster of as many devices, or plan for this one",
        )
    devices = tuple(cluster.devices[rank] for rank in plan.placement[: len(plan.stages)])
    profiles = [profile_of(costs, d.name, graph) for d in devices]
    trained = sum(s.memory.gradients for s in plan.stages)
    options = CostOptions(
        microbatches=plan.microbatches,
        optimizer_bytes=sum(s.memory.optimizer for s in plan.stages) / trained if trained else 0.0,
        weights=plan.weights,
    )
    model = CostModel(graph, profiles, replace(cluster, devices=devices), options)
    stages = plan.replicated(plan.stage_graph(graph))
    policy = [plan.memory.stages[s] if s < len(plan.memory.stages) else {} for s in range(len(plan.stages))]
    # Of what a StageCost says, only weight versions depend on how many micro-batches are in flight.
    in_flight = schedules.in_flight(plan.as_schedule)
    ahead = plan.memory.ahead
    parts = [
        stage_plan(model, stages, s, max(1, in_flight[s]), own, ahead=s in ahead)
        for s, own in enumerate(policy)
    ]
    each = stage_costs(model, stages, parts, policy, ahead=ahead) * plan.replicas
    return _counting_once(each, plan, stages, graph, options.optimizer_bytes)


def _counting_once(
    costs: tuple[StageCost, ...], plan: Plan, stages: StageGraph, graph: OpGraph, optimizer_bytes: float
) -> tuple[StageCost, ...]:
    """A parameter that several stages of one rank read is there once, and so is the batch: the first of them
    counts it."""
    held: dict[int, set[str]] = {}
    found = []
    for cost, rank, names in zip(costs, plan.placement, stages.params, strict=True):
        batch = cost.static_bytes.get("batch", 0) if rank in held else 0
        held.setdefault(rank, set())
        again = [graph.parameter[name] for name in names if name in held[rank]]
        held[rank].update(names)
        trained = sum(p.bytes for p in again if p.trainable)
        saved = {
            "parameters": sum(p.bytes for p in again),
            "gradients": trained,
            "optimizer": round(trained * optimizer_bytes),
            "batch": batch,
        }
        static = {kind: max(0, size - saved.get(kind, 0)) for kind, size in cost.static_bytes.items()}
        found.append(replace(cost, static_bytes=static))
    return tuple(found)


def simulate_plan(plan: Plan, graph: OpGraph, costs: Costs, cluster: Cluster) -> Timeline:
    """One step of a plan, predicted."""
    stages = plan.replicated(plan.stage_graph(graph))
    program = lower(plan.as_schedule, stages, policy=plan.memory)
    return simulate(program, stages, costs_of(plan, graph, costs, cluster), cluster, caps=plan.caps)


def _one_device_each(cluster: Cluster, schedule: str, ranks: int) -> Cluster:
    if ranks > len(cluster.devices):
        raise PlanError(
            f"{ranks} ranks for {len(cluster.devices)} devices", hint="use fewer ranks, or add devices"
        )
    shape, placement = schedules.default_placement(schedule, ranks)
    own = []
    for rank in placement[: len(placement) // shape.replicas]:
        device = cluster.devices[rank]
        own.append(replace(device, memory_bytes=max(1, device.memory_bytes // placement.count(rank))))
    return replace(cluster, devices=tuple(own))
