"""A step of a plan, predicted from profiles."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.cluster import Cluster
from ..ir.errors import PlanError
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..ir.timeline import Timeline
from ..planner.plan_costs import PlanCosts


def simulate(
    plan: Plan, graph: OpGraph, costs: Profile | Mapping[str, Profile], cluster: Cluster
) -> Timeline:
    """Predict a step of a plan from a profile. Needs neither torch nor the model.

    plan: its cut, schedule, memory policy and placement.  graph: of the model that it was made for.
    costs: one profile for all devices, or by device name.
    cluster: at least one device per rank, in rank order, with their links.
    Returns: when what happens, in seconds from the start of the step, and bytes held.
    Raises: PlanError if plan, graph, profile and cluster do not belong together; CutError if the plan's
        stages are no cut of the graph; ScheduleError if its rows cannot be run.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> captured = pipeloom.capture(job, 4)
    >>> card = pipeloom.Device(name="card", memory_bytes=2**30)
    >>> link = pipeloom.Link(bandwidth_bytes_per_s=10e9, latency_s=1e-5)
    >>> cluster = pipeloom.Cluster(devices=(card, card), within_node=link)
    >>> costs = pipeloom.profile(captured)  # as if the cards were as fast as this machine
    >>> plan = pipeloom.plan(job, stages=2, microbatch_size=4, cluster="2 x a100-40", captured=captured)
    >>> predicted = pipeloom.simulate(plan, captured.graph, costs, cluster)
    >>> predicted.source, predicted.ranks, 0 < predicted.bubble < 1
    ('predicted', 2, True)
    """
    plan.stage_graph(graph)  # refuses a plan of another model
    profiles = [costs] if isinstance(costs, Profile) else list(costs.values())
    for profiled in profiles:
        if profiled.graph != plan.graph:
            raise PlanError(
                f"the profile was made for model {profiled.graph}, the plan for {plan.graph}",
                hint="profile the plan's model",
            )
        if profiled.batch and plan.batch and profiled.batch != plan.batch:
            raise PlanError(
                f"the profile is of micro-batches {', '.join(profiled.batch)}, the plan for "
                f"{', '.join(plan.batch)}",
                hint="profile with the plan's micro-batch size",
            )
    return PlanCosts(graph, costs, cluster).simulate(plan)
