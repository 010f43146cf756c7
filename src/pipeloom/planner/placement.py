"""Where the stages of a plan go: one on each rank, several on each, or replicas of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..ir.action import B, F, I, W
from ..ir.cluster import Cluster
from ..ir.costs import StageCost
from ..ir.errors import PlanError, ScheduleError
from ..ir.stages import StageGraph
from ..schedules import registry
from ..schedules.language import uplinks
from ..simulator.shared_links import transfer_s


@dataclass(frozen=True)
class Layout:
    """placement: the rank of each stage of a schedule, of one replica after another."""

    placement: tuple[int, ...]
    replicas: int = 1

    @property
    def stages(self) -> int:
        return len(self.placement) // self.replicas

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def most_replicas(self) -> int:
        """Of how many replicas a rank has stages, at most."""
        homes = {(rank, index // self.stages) for index, rank in enumerate(self.placement)}
        return max(Counter(rank for rank, _ in homes).values())

    @property
    def in_line(self) -> bool:
        """Whether stage s is alone on rank s."""
        return self.placement == tuple(range(len(self.placement)))

    def homes(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage: as many as there are replicas."""
        return self.placement[stage :: self.stages]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Per rank the stages that it holds, one as often as it holds replicas of it."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for index, rank in enumerate(self.placement):
            held[rank].append(index % self.stages)
        return tuple(map(tuple, held))


def layout_of(schedule: str, ranks: int) -> Layout:
    """The usual places of a schedule's stages.

    Raises: ScheduleError if one of them is to span several ranks.
    """
    shape, placement = registry.default_placement(schedule, ranks)
    if shape.shards:
        both = " and ".join(str(placement[s]) for s in shape.shards[0])
        raise ScheduleError(
            f"schedule {schedule} cannot be run: its stage {shape.shards[0][0]} spans ranks {both}, and the "
            "runtime runs a stage on one rank",
            hint="it can be checked, simulated and drawn; to run, place each stage on one rank",
        )
    return Layout(placement, shape.replicas)


def stages_for(schedule: str, ranks: int) -> int:
    """Into how many stages a model is cut for a schedule in its usual placement.

    Raises: ScheduleError if one of them is to span several ranks.

    >>> stages_for("1f1b", 4), stages_for("zb_v", 4), stages_for("dualpipe", 4), stages_for("gis:v=4", 4)
    (4, 8, 4, 16)
    """
    return layout_of(schedule, ranks).stages


def refuse_microbatches(schedule: str, microbatches: int, replicas: int) -> None:
    """Raises: PlanError if the directions of a schedule cannot have equally many micro-batches."""
    if microbatches % replicas:
        raise PlanError(
            f"{schedule} runs in {replicas} directions, there are {microbatches} micro-batches",
            hint=f"use a multiple of {replicas}",
        )


def message_seconds(
    stages: StageGraph, placement: tuple[int, ...], cluster: Cluster
) -> Callable[[int, int], float]:
    """(from stage, to stage) -> seconds of its message: of values to the stages that read them, of gradients
    the other way."""
    size: dict[tuple[int, int], int] = {}
    for crossing in stages.crossings:
        there, back = (crossing.source, crossing.target), (crossing.target, crossing.source)
        size[there] = size.get(there, 0) + crossing.value.bytes
        size[back] = size.get(back, 0) + crossing.value.bytes * crossing.value.needs_grad

    def seconds(source: int, target: int) -> float:
        return transfer_s(cluster, placement[source], placement[target], size.get((source, target), 0))

    return seconds


def uplinks_of(costs: Sequence[StageCost], placement: tuple[int, ...], cluster: Cluster) -> uplinks.Uplinks:
    """The uplinks through which the ranks of stages copy, and what a copy of each stage takes of its."""
    names: dict[object, int] = {}
    of_rank = []
    for rank in range(max(placement) + 1):
        switch = cluster.devices[rank].switch
        of_rank.append(names.setdefault(rank if switch is None else switch, len(names)))
    seconds = []
    for cost, rank in zip(costs, placement, strict=True):
        if (switch := cluster.devices[rank].switch) is None:
            seconds.append(max(cost.offload_s, cost.reload_s))
        else:
            seconds.append(cost.offloaded_bytes / cluster.switches[switch].bandwidth_bytes_per_s)
    return uplinks.Uplinks(of_rank=tuple(of_rank), seconds=tuple(seconds))


def residual_room(
    costs: Sequence[StageCost], placement: tuple[int, ...], cluster: Cluster
) -> tuple[float, ...]:
    """Bytes that the cap of each rank leaves for residuals beside parameters, gradients, optimizer state,
    buffers and the most scratch of any action; messages are not known yet.

    >>> from dataclasses import replace
    >>> from pipeloom.ir.cluster import Device, Link
    >>> from pipeloom.ir.costs import equal_costs
    >>> (cost,) = equal_costs(1)
    >>> costs = [replace(cost, static_bytes={"parameters": 3}, transient_bytes={F: 1})] * 2
    >>> card = Device(name="card", memory_bytes=10)
    >>> residual_room(costs, (0, 0), Cluster(devices=(card,), within_node=Link(bandwidth_bytes_per_s=1.0)))
    (3.0,)
    """
    room = [float(device.memory_bytes) for device in cluster.devices]
    scratch = [0] * len(room)
    for cost, rank in zip(costs, placement, strict=True):
        room[rank] -= sum(cost.static_bytes.values())
        of_actions = (cost.transient_bytes.get(kind, 0) for kind in (F, B, I, W))
        scratch[rank] = max(scratch[rank], *of_actions)
    return tuple(max(0.0, left - most) for left, most in zip(room, scratch, strict=True))
