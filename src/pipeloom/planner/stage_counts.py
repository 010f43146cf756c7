"""How many stages there can be: requests for more are refused, with what is possible."""

from __future__ import annotations

from ..ir.cluster import Cluster
from ..ir.errors import PlanError, shown
from ..ir.graph import OpGraph
from ..schedules import registry
from .placement import stages_for
from .stage_cost.readers import Readers


class TooManyStages(PlanError):
    """The model cannot be cut into so many. places: the most that it can."""

    def __init__(self, message: str, *, hint: str | None = None, places: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.places = places


def refuse_nonsense(graph: OpGraph, cluster: Cluster, ranks: int, schedule: str) -> None:
    """Raises: PlanError if there are more stages than ops, more ranks than devices, or none."""
    ops = sum(not op.cheap for op in graph.ops)
    if ranks < 1:
        raise PlanError(f"{ranks} stages", hint="use at least 1")
    placed = ranks <= len(cluster.devices) and registry.entry(schedule).place != "line"
    stages = stages_for(schedule, ranks) if placed else ranks
    if stages > ops:
        places = len(Readers(graph).cut_points) - 1
        why = f"{shown(stages)} stages" + (f", the model has {ops} ops" if placed else f" for {ops} ops")
        raise too_many_stages(why, places, schedule, ranks, cluster)
    if ranks > len(cluster.devices):
        raise PlanError(
            f"{ranks} {'ranks' if registry.entry(schedule).place != 'line' else 'stages'} for "
            f"{len(cluster.devices)} devices",
            hint="use fewer stages, or add devices",
        )


def too_many_stages(why: str, places: int, schedule: str, ranks: int, cluster: Cluster) -> TooManyStages:
    """The error where a schedule wants more stages than a model can be cut into: what is advised is not
    refused next.

    why: begins with how many it wants.  places: how many there can be.
    """
    if registry.entry(schedule).place == "line":
        most = min(places, len(cluster.devices))
        hint = f"use at most {most} {'stages' if most > 1 else 'stage'}"
        return TooManyStages(why, hint=hint, places=places)
    most = min(ranks - 1, places, len(cluster.devices))
    fewer = next((n for n in range(most, 0, -1) if stages_for(schedule, n) <= places), None)
    ranks_word = "ranks" if fewer and fewer > 1 else "rank"
    hint = f"use at most {fewer} {ranks_word} (--ranks {fewer})" if fewer else "use another schedule"
    return TooManyStages(f"{schedule} on {ranks} ranks is for {why}", hint=hint, places=places)
