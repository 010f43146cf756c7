"""Tuning a schedule by hand: where two differ, and what saves most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from ..ir.cluster import Link
from ..ir.costs import StageCost
from ..ir.errors import ScheduleError
from ..simulator.simulate import simulate
from .scenario import SimulatedSchedule, explain

LESS = 0.9


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place of a rank's row at which two schedules differ, and what each runs there; "" where its
    row has ended."""

    rank: int
    place: int
    actions: tuple[str, str]
    starts_s: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The step if one thing takes 10 % less. what: "F", "I", "W", or "transfers" with stage -1."""

    what: str
    stage: int
    step_s: float
    saved_s: float


def divergences(one: SimulatedSchedule, other: SimulatedSchedule) -> list[Divergence]:
    if one.schedule.ranks != other.schedule.ranks:
        raise ScheduleError(
            f"{one.schedule.name} has {one.schedule.ranks} ranks, {other.schedule.name} has "
            f"{other.schedule.ranks}",
            hint="compare schedules on the same ranks",
        )
    begun = [{e.action: e for e in simulated.timeline.events} for simulated in (one, other)]
    found = []
    for rank in range(one.schedule.ranks):
        first, second = (map(str, simulated.schedule.rows[rank]) for simulated in (one, other))
        for place, actions in enumerate(zip_longest(first, second, fillvalue="")):
            if actions[0] != actions[1]:
                a, b = (
                    events[action].start_s if action else simulated.timeline.step_s
                    for action, events, simulated in zip(actions, begun, (one, other), strict=True)
                )
                found.append(Divergence(rank=rank, place=place, actions=actions, starts_s=(a, b)))
                break
    return found


def idle_side_by_side(one: SimulatedSchedule, other: SimulatedSchedule) -> list[tuple[str, float, float]]:
    """(reason, rank-seconds in the one, in the other), the largest difference first."""
    first, second = (explain(simulated).by_reason for simulated in (one, other))
    rows = [(reason, first.get(reason, 0.0), second.get(reason, 0.0)) for reason in {**first, **second}]
    return sorted(rows, key=lambda row: -abs(row[1] - row[2]))


def sensitivity(simulated: SimulatedSchedule) -> list[Sensitivity]:
    """The step if F, I or W of one stage, or all transfers, take 10 % less, in the same order of actions;
    what saves most first. Replicas and shards of a stage change together."""
    step_s = simulated.timeline.step_s
    found: list[Sensitivity] = []
    for stage in sorted({simulated.stages.origin(s) for s in range(len(simulated.costs))}):
        for what in ("F", "I", "W"):
            costs = tuple(
                _less(cost, what) if simulated.stages.origin(s) == stage else cost
                for s, cost in enumerate(simulated.costs)
            )
            new_s = simulate(simulated.program, simulated.stages, costs, simulated.cluster).step_s
            found.append(Sensitivity(what=what, stage=stage, step_s=new_s, saved_s=step_s - new_s))
    cluster, node = simulated.cluster, simulated.cluster.node_link
    faster = replace(
        cluster, within_node=_faster(cluster.within_node), node_link=None if node is None else _faster(node)
    )
    if faster != simulated.cluster:
        new_s = simulate(simulated.program, simulated.stages, simulated.costs, faster).step_s
        found.append(Sensitivity(what="transfers", stage=-1, step_s=new_s, saved_s=step_s - new_s))
    return sorted(found, key=lambda one: -one.saved_s)


def _less(cost: StageCost, what: str) -> StageCost:
    name = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s"}[what]
    saved = (1 - LESS) * getattr(cost, name)
    whole = cost.backward_s - (0.0 if what == "F" else saved)
    return replace(cost, backward_s=whole, **{name: getattr(cost, name) - saved})


def _faster(link: Link) -> Link:
    bandwidth = link.bandwidth_bytes_per_s / LESS
    return replace(link, latency_s=link.latency_s * LESS, bandwidth_bytes_per_s=bandwidth)
