"""Random graphs, devices and caps, and what planners make of them: for the joint search and its bench."""

import random
from dataclasses import replace
from math import inf

from branching_graphs import KINDS, cluster_of, random_graph

from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.graph import OpGraph
from pipeloom.ir.plan import Plan
from pipeloom.ir.profile import Profile
from pipeloom.planner.planners import PLANNERS, make_plan, searches
from pipeloom.planner.request import PlanOptions
from pipeloom.schedules import registry


def random_case(seed: int) -> tuple[OpGraph, Profile, Cluster]:
    """A graph, its profile, and devices, half of the time with links to the host."""
    dice = random.Random(seed)
    graph, profile = random_graph(seed, dice.randint(6, 10), KINDS[seed % 3])
    cluster = cluster_of(dice.choice((2, 3)), bytes_per_s=10 ** dice.uniform(1, 3))
    if dice.random() < 0.5:
        link = Link(bandwidth_bytes_per_s=10 ** dice.uniform(1, 3))
        cluster = replace(cluster, devices=tuple(replace(d, host_link=link) for d in cluster.devices))
    return graph, profile, cluster


def planned(
    graph, profile, cluster: Cluster, planner: str, schedule: str | None = None, **how
) -> Plan | None:
    """None if there is no such plan."""
    options = PlanOptions(
        ranks=len(cluster.devices), microbatches=6, schedule=schedule, planner=planner, **how
    )
    try:
        return make_plan(graph, profile, cluster, options, explained=False)
    except PipeloomError:
        return None


def step_s(plan: Plan | None) -> float:
    return inf if plan is None else plan.predicted_step_s


def with_memory(cluster: Cluster, size: int) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, memory_bytes=size) for d in cluster.devices))


SCHEDULES = [
    name
    for name in registry.names()
    if registry.entry(name).weights == "flush" and not registry.entry(name).lacks and name != "forward_only"
]

PLANNERS_OF_ONE = [name for name in PLANNERS if not searches(name)]
"""Planners for one schedule."""
