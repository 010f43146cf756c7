"""Copies until the caps are kept, of schedules that offload as much as that takes.

How much a rank may hold of residuals is what its cap leaves beside the rest.
The rest is known once a model is cut, up to when messages and scratch come together with the most residuals,
which a simulation says:

    1. The room for residuals: the cap less parameters, gradients, optimizer state, buffers and scratch.
    2. Rows with as many copies as that takes (`schedules/copies`), and their step.
    3. Again, with the room larger or smaller by as much as the simulated peak is away from the cap, until
       the caps are kept.

All that with each stage prepared to leave, which makes its cheap residuals again, and with only those that
do leave. Of all that keep the caps the one with the shortest step is taken.

Cuts are found before that, for what a stage is taken to hold: as little as copies can make of it, as much as
the order holds without any, or what is between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from ..schedules import registry
from .candidate import Candidate, Room
from .request import Request
from .search.cut_search import Search

FIT_ROUNDS = 4
"""Simulations at most until caps are kept."""


def fit_caps(request: Request, search: Search, cuts: tuple[int, ...]) -> Candidate:
    """The candidate of a cut; where its schedule fits the caps, with as many copies as these ask for.

    Raises: ScheduleError if the schedule cannot be built.
    """
    first = Candidate(request, search, cuts)
    if not request.fits_caps:
        return first
    tries = [first, *_closer(first, first.treated)]
    best = min(tries, key=_key)
    if best.leaving != best.treated:
        tries += _closer(best, best.leaving)
    return min(tries, key=_key)


def more_held(request: Request, search: Search) -> Iterator[Search]:
    """The same with stages taken to hold more than what copies can make of it: half of what they hold without
    copies beyond that, and all.
    """
    count, least = request.layout.stages, search.in_flight
    without = registry.in_flight(request.usual)
    most = [max(without[stage::count]) for stage in range(count)]
    halfway = tuple(ceil((low + high) / 2) for low, high in zip(least, most, strict=True))
    for held in dict.fromkeys((halfway, tuple(most))):
        if held != least:
            yield replace(search, in_flight=held)


def _closer(found: Candidate, treated: frozenset[int]) -> Iterator[Candidate]:
    """The same cut with room as its simulated peaks ask for, until it keeps its caps.

    treated: stages that may leave.
    """
    request, search, cuts = found.request, found.search, found.cuts
    for _ in range(FIT_ROUNDS):
        room = _room_left(found)
        if room == found.room and treated == found.treated:
            return
        found = Candidate(request, search, cuts, Room(room, treated))
        yield found
        if not any(found.over):
            return


def _room_left(found: Candidate) -> tuple[float, ...]:
    """Bytes of each rank for residuals: less than it held, by as much as it passed its cap, or more than it
    was given, by as much as it stayed below."""
    assert found.room is not None
    caps = [device.memory_bytes for device in found.request.cluster.devices]
    rooms = []
    for rank, (own, cap) in enumerate(zip(found.room, caps, strict=True)):
        left = cap - found.timeline.peak_bytes(rank)
        most = min(own, found.timeline.residual_peaks[rank]) if left < 0 else own
        rooms.append(max(0.0, most + left))
    return tuple(rooms)


def _key(found: Candidate) -> tuple[int, bool, float]:
    return sum(found.over), found.host_shortage is not None, found.timeline.step_s
