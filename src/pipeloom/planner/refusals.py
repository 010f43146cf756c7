"""Why something cannot be planned: too many stages, too little host memory, no cut that fits, and the least
that would do. `plan_advice.py` tries the advice.

With memory optimisation the least is what remains when everything is freed that may be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import ceil

import numpy as np

from ..ir.cluster import Cluster, Device
from ..ir.errors import InfeasibleError, PlanError, shown
from ..ir.graph import OpGraph
from ..ir.text import format_bytes
from ..schedules import registry
from ..schedules.language.names import CHUNKS, parse_name
from .placement import stages_for
from .search.cut_search import Search
from .stage_cost.tensors import Readers
from .strategies.probe import filled


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
    if (chunks := places // ranks) > 1 and parse_name(schedule).options.get(CHUNKS, 0) > chunks:
        hint = f"use at most {chunks} stages per rank (--chunks {chunks})"
        return TooManyStages(f"{schedule} on {ranks} ranks is for {why}", hint=hint, places=places)
    most = min(ranks - 1, places, len(cluster.devices))
    fewer = next((n for n in range(most, 0, -1) if stages_for(schedule, n) <= places), None)
    ranks_word = "ranks" if fewer and fewer > 1 else "rank"
    hint = f"use at most {fewer} {ranks_word} (--ranks {fewer})" if fewer else "use another schedule"
    return TooManyStages(f"{schedule} on {ranks} ranks is for {why}", hint=hint, places=places)


def state_passes_caps(graph: OpGraph, cluster: Cluster, sharing: int) -> bool:
    """Whether no cut can fit, because parameters, gradients and optimizer state alone need more: those of the
    model more than all devices have together, or those of one op more than any device has.

    cluster: the devices of one pipeline.  sharing: replicas that share out the optimizer's state.
    """

    def state(names: Iterable[str]) -> int:
        params = [graph.parameter[name] for name in set(names)]
        trained = sum(p.gradient_bytes + p.update.state // sharing for p in params if p.trainable)
        return trained + sum(p.bytes for p in params)

    caps = [device.memory_bytes for device in cluster.devices]
    each = [op.params for op in graph.ops]
    return state(chain.from_iterable(each)) > sum(caps) or max(map(state, each)) > max(caps)


def host_shortage(needs: Sequence[int], cluster: Cluster) -> str | None:
    """What is short on the node that lacks most; None if all have room. A node has what its devices have
    together; one with a device of which nothing is known is taken to have room.

    needs: bytes of each rank on its host.

    >>> from pipeloom.ir.cluster import Device, Link
    >>> card = Device(name="card", memory_bytes=1, host_memory_bytes=100)
    >>> two = Cluster(devices=(card, card), within_node=Link(bandwidth_bytes_per_s=1.0))
    >>> host_shortage((150, 40), two)
    >>> host_shortage((150, 60), two)
    'the ranks of node 0 offload 210 B, its host memory for them is 200 B: rank 0 alone offloads 150 B'
    """
    ranks: dict[int, list[int]] = {}
    for rank, device in enumerate(cluster.devices[: len(needs)]):
        ranks.setdefault(device.node, []).append(rank)
    lacking, found = 0, None
    for node, own in ranks.items():
        rooms = [device.host_memory_bytes for device in cluster.devices if device.node == node]
        room, needed = sum(rooms), sum(needs[rank] for rank in own)
        if all(rooms) and needed - room > lacking:
            lacking, most = needed - room, max(own, key=needs.__getitem__)
            found = (
                f"the ranks of node {node} offload {format_bytes(needed)}, its host memory for them is "
                f"{format_bytes(room)}: rank {most} alone offloads {format_bytes(needs[most])}"
            )
    return found


def pair_low_with_high(cluster: Cluster) -> Cluster:
    """The same devices in another order of ranks: first and last ranks together on a node, so that all nodes
    need about as much host memory. More messages then go between nodes.

    Low ranks keep residuals longest, so they have most of them on the host.
    Source: PipeOffload (arXiv 2503.01328), which does so to even out host memory.

    >>> from pipeloom.ir.cluster import Device, Link
    >>> cards = tuple(Device(name="card", memory_bytes=1, node=node) for node in (0, 0, 1, 1))
    >>> paired = pair_low_with_high(Cluster(devices=cards, within_node=Link(bandwidth_bytes_per_s=1.0)))
    >>> [device.node for device in paired.devices]
    [0, 1, 1, 0]
    """
    low: list[Device] = []
    high: list[Device] = []
    for at, device in enumerate(sorted(cluster.devices, key=lambda device: device.node)):
        (low if at % 2 == 0 else high).append(device)
    return replace(cluster, devices=(*low, *reversed(high)))


class NoCutFits(InfeasibleError):
    """No cut fits by estimate. share: of all caps, with which one does.  stages: how many would do."""

    def __init__(self, message: str, *, share: float = 0.0, stages: int | None = None) -> None:
        super().__init__(message)
        self.share, self.stages = share, stages


MANY = 16
MORE_STAGES = 4
"""Up to so many times the stages are tried when the smallest number that fits is sought."""

ROUGHLY = 0.01
"""Relative error of the smallest cap where memory is optimised."""


def explain_infeasible(
    search: Search,
    more: Callable[[int], Search | None],
) -> InfeasibleError:
    """The error for a search that found nothing.

    more: number of stages -> the search with so many, on devices like these; None if they differ.
    """
    share, cuts = least_share(search)
    stage, need = binding_stage(scale_caps(search, share), cuts)
    freed = ", even with all freed that may be" if search.optimises else ""
    stages = "1 stage" if len(search.caps) == 1 else f"{len(search.caps)} stages"
    return NoCutFits(
        f"no cut of {len(search.model)} ops into {stages} fits{freed}: in the one that "
        f"needs least, stage {stage} needs {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}{closely(need, search.caps[stage])}",
        share=share,
        stages=fewest_stages(search, more),
    )


def passes_caps(over: Sequence[int], cluster: Cluster, schedule: str) -> InfeasibleError:
    """The error where stages fit by the search's estimate, and no cut does once all its stages are known.

    over: bytes by which each rank passes its cap in the cut that comes closest.
    """
    rank = max(range(len(over)), key=over.__getitem__)
    cap = cluster.devices[rank].memory_bytes
    return InfeasibleError(
        f"no cut found keeps its caps with {schedule}: in the closest, rank {rank} holds "
        f"{format_bytes(cap + over[rank])}, its device's cap is {format_bytes(cap)}"
        f"{closely(cap + over[rank], cap)}"
    )


def closely(need: int, cap: int) -> str:
    """The difference, where both are printed alike."""
    alike = format_bytes(need) == format_bytes(cap) and need > cap
    return f", {format_bytes(need - cap)} less" if alike else ""


def does_not_fit(search: Search, cuts: tuple[int, ...], name: str) -> InfeasibleError:
    """The error for a cut by a planner that does not look at memory."""
    stage, need = binding_stage(search, cuts)
    return InfeasibleError(
        f"planner {name} gives stage {stage} {format_bytes(need)}, its device's cap is "
        f"{format_bytes(search.caps[stage])}{closely(need, search.caps[stage])}"
    )


def finds_no_chain(search: Search, name: str) -> InfeasibleError:
    """The error for a planner that counts memory in a way of its own: a cut that others find may fit."""
    return InfeasibleError(
        f"planner {name} finds no chain of {len(search.caps)} stages that fits by its own account of memory, "
        "the sum of what each piece needs"
    )


def stage_needs(search: Search, cuts: tuple[int, ...]) -> list[int]:
    """Bytes of each stage of a cut, with residuals freed as the search's caps demand, if they may be."""
    if search.optimises:
        bounds = enumerate(pairwise(cuts))
        return [round(search.evaluate(start, end, stage).peak_bytes) for stage, (start, end) in bounds]
    found = []
    for stage, (start, end) in enumerate(pairwise(cuts)):
        footprint, _ = search.model.row(start, np.array([end]))
        found.append(int(search.model.peaks(footprint, np.array([search.in_flight[stage]]))[0, 0]))
    return found


def binding_stage(search: Search, cuts: tuple[int, ...]) -> tuple[int, int]:
    """The stage that fills most of its cap, and its bytes."""
    sizes = stage_needs(search, cuts)
    return max(enumerate(sizes), key=lambda pair: pair[1] / search.caps[pair[0]])


def least_share(search: Search) -> tuple[float, tuple[int, ...]]:
    """The share of the caps with which some cut fits, and that cut.

    Above 1 where nothing fits. Where memory is optimised it is found by bisection, filling stage after stage
    under smaller and smaller caps, starting from what is needed with every residual kept.
    """
    high, cuts = search.smallest()
    if not search.optimises:
        return high, cuts
    low = 0.0
    while high - low > ROUGHLY * high:
        middle = (low + high) / 2
        smaller = scale_caps(search, middle)
        if found := filled(smaller.problem):
            high, cuts = middle, smaller.problem.positions(found)
        else:
            low = middle
    return high, cuts


def scale_caps(search: Search, share: float) -> Search:
    """The same under caps of this share of its own."""
    return replace(search, caps=tuple(max(1, ceil(cap * share)) for cap in search.caps))


def fewest_stages(search: Search, more: Callable[[int], Search | None]) -> int | None:
    """The smallest number of stages, above the search's, with which something fits; None if none does.

    By bisection: more stages on more devices like these need less each. None too where looking would take
    long, for large graphs on many devices.
    """
    if search.large and len(search.caps) > MANY:
        return None
    low, high = len(search.caps), min(MORE_STAGES * len(search.caps), len(search.model.cut_points) - 1)
    widest = more(high) if high > low else None
    if widest is None or not fits(widest):
        return None

    def enough(stages: int) -> bool:
        wider = more(stages)
        assert wider is not None  # the devices are alike, as the widest search showed
        return fits(wider)

    return low + 1 + bisect_left(range(low + 1, high), True, key=enough)


def fits(search: Search) -> bool:
    """Whether some cut fits; where memory is optimised, as far as filling stage after stage shows."""
    return bool(filled(search.problem)) if search.optimises else search.smallest()[0] <= 1
