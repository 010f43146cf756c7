"""What a planner finds under a smaller cap is a candidate under a larger one.

Planners weigh stages, and free memory as far as caps ask for it; only then is the step simulated. So with
less room they may find a cut with a faster step. They search once more, under the next smaller cap that their
plan does not keep. Such caps are powers of one number, whatever cap was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import floor, log2

from ..ir.cluster import Cluster
from .candidate import Candidate, Room
from .request import Request

PER_DOUBLING = 4
"""Smaller caps between one and its double."""


def faster_under_less(
    request: Request, best: Candidate | None, find: Callable[[Request], Candidate | None]
) -> Candidate | None:
    """The best candidate of a request, or the best under the next smaller caps, if that one's step is faster.

    best: None if nothing was found that fits.  find: the best candidate of a request. The step of `best` is
    no bound for that: a cut may be slower at first, and faster once it is moved to keep its caps.
    """
    smaller = next((one for one in _smaller_caps(request.cluster) if not _keeps(best, one)), None)
    found = None if smaller is None else find(replace(request, cluster=smaller))
    if found is None:
        return best
    own = replace(found.request, cluster=request.cluster)
    again = Candidate(own, found.search, found.cuts, Room(found.room, found.treated))
    if again.tighter() is not None or again.host_shortage is not None:
        return best
    return again if best is None or again.timeline.step_s < best.timeline.step_s else best


def _smaller_caps(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the memory of each device rounded down to a power, then one power less each time."""
    powers = [floor(PER_DOUBLING * log2(device.memory_bytes)) for device in cluster.devices]
    for less in range(min(powers)):
        sizes = (int(2 ** ((power - less) / PER_DOUBLING)) for power in powers)
        devices = zip(cluster.devices, sizes, strict=True)
        yield replace(cluster, devices=tuple(replace(device, memory_bytes=size) for device, size in devices))


def _keeps(found: Candidate | None, cluster: Cluster) -> bool:
    """Whether there is a candidate that keeps the caps of a cluster."""
    return found is not None and all(
        found.timeline.peak_bytes(rank) <= device.memory_bytes for rank, device in enumerate(cluster.devices)
    )
