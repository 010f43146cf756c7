"""What becomes of a cut: copies until it keeps its caps, moved cuts, stages side by side.

Copies that keep the caps: how much a rank may hold of residuals is what its cap leaves beside the rest.
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

Polishing is the last step of a search: cuts moved by a few ops, accepted by the simulated step.
A search weighs a plan by its slowest stage. Of plans with equally slow ones some fill and drain the pipeline
faster, and what a greedy choice of treatments takes jumps from one cut to the next; so the plan of a larger
cap may be slower than that of a smaller one. Moves by the simulated step make both rare.

What a planner finds under a smaller cap is a candidate under a larger one.
Planners weigh stages, and free memory as far as caps ask for it; only then is the step simulated. So with
less room they may find a cut with a faster step. They search once more, under the next smaller cap that their
plan does not keep. Such caps are powers of one number, whatever cap was asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from math import ceil, floor, inf, log2
from operator import add, ge, le

import numpy as np

from ..ir.cluster import Cluster
from ..schedules import registry
from .candidate import Candidate, Room, step_s
from .refusals import scale_caps
from .request import Request
from .search.cut_search import Search
from .search.problem import Cuts

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


STEPS = (1, 2, 4)
"""Places by which a cut moves, to either side."""

BUDGET = 120_000
"""Micro-batches times stages that all simulations of one search may have together."""

MOST, MOST_OF_LARGE = 200, 60
"""Moves that are tried at most, and of large graphs, whose stages take long to weigh."""

GAIN = 1e-6
"""Share of the step that a move has to save."""


def polish_cuts(kept: Sequence[Candidate], search: Search) -> Candidate:
    """The fastest of some plans that keep their caps, or what becomes of it; never slower.

    search: that of the planner, in which the others' cuts are weighed, too.
    """
    best = min(kept, key=step_s)
    if len(search.caps) < 2:
        return best
    climb = _Climb(best)
    for found in kept:
        if found.search.model.readers == search.model.readers:  # positions in the same op order
            climb.try_(search, found.cuts)
    places = best.search.model.cut_points.tolist()
    while any(climb.try_(climb.best.search, cuts) for cuts in _moves(climb.best, places)):
        pass
    return climb.best


class _Climb:
    """The best so far, and what was tried."""

    def __init__(self, best: Candidate) -> None:
        request = best.request
        self.best = best
        most = MOST_OF_LARGE if best.search.large else MOST
        self.left = min(most, BUDGET // (request.microbatches * len(best.search.caps)))
        self.tried = {(id(best.search), best.cuts)}

    def try_(self, search: Search, cuts: Cuts) -> bool:
        """Whether these cuts are faster; then they are the best."""
        key = id(search), cuts
        if key in self.tried or self.left <= 0:
            return False
        self.tried.add(key)
        self.left -= 1
        if not search.by_depth and not all(
            search.evaluate(i, j, s).fits for s, (i, j) in enumerate(pairwise(cuts))
        ):
            return False
        if least_step_s(self.best.request, search, cuts) >= self.best.timeline.step_s:
            return False
        found = fit_caps(self.best.request, search, cuts)
        if (
            not found.fits
            or found.tighter() is not None
            or found.timeline.step_s >= (1 - GAIN) * self.best.timeline.step_s
        ):
            return False
        self.best = found
        return True


def least_step_s(request: Request, search: Search, cuts: Cuts) -> float:
    """No step is shorter, in whatever order: the busiest rank begins when what its first op needs can be
    there, and computes its stages for all micro-batches; unless the pipeline does not drain."""
    model, layout = search.model, request.layout
    if layout.replicas > 1:  # which divide the micro-batches
        return 0.0
    begins = request.earliest_s[np.array(model.readers.order)] if model.readers.order else request.earliest_s
    busy, first = [0.0] * layout.ranks, [inf] * layout.ranks
    for stage, (start, end) in enumerate(pairwise(cuts)):
        seconds, rank = model.tables.prefix_s[model.kind[stage]], layout.placement[stage]
        busy[rank] += request.microbatches * float(seconds[end] - seconds[start])
        first[rank] = min(first[rank], float(begins[start:end].min()))
    return max(busy if request.updates is not None else map(add, busy, first))


def _moves(found: Candidate, places: Sequence[int]) -> Iterator[Cuts]:
    """Its cuts with one of them moved; those beside its slowest stages first."""
    cuts = found.cuts
    turns = [part.turn_s for part in found.parts]
    order = sorted(range(1, len(cuts) - 1), key=lambda k: -max(turns[k - 1], turns[k]))
    for step in STEPS:
        for k in order:
            at = bisect_left(places, cuts[k])
            for to in (at - step, at + step):
                if 0 <= to < len(places) and cuts[k - 1] < places[to] < cuts[k + 1]:
                    yield (*cuts[:k], places[to], *cuts[k + 1 :])


def fails_again(search: Search, failed: Sequence[Search]) -> bool:
    """Whether a search need not be made, as others, in the same model, found no cut: one of them had no less
    memory, no more micro-batches in flight and all its ways to free memory."""
    return any(
        set(search.treatments) <= set(other.treatments)
        and all(map(le, search.caps, other.caps))
        and all(map(ge, search.in_flight, other.in_flight))
        for other in failed
    )


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
        yield cluster.with_memory([int(2 ** ((power - less) / PER_DOUBLING)) for power in powers])


def _keeps(found: Candidate | None, cluster: Cluster) -> bool:
    return found is not None and all(
        found.timeline.peak_bytes(rank) <= device.memory_bytes for rank, device in enumerate(cluster.devices)
    )


Propose = Callable[[Search], Iterator[Cuts]]
"""Several cuts of a search, for stages of a DAG, which are worth a simulation."""


NEARLY_FULL = 0.8
"""Share of its cap that a rank holds with every residual kept from which on freeing some is tried, too."""


def shallow_candidates(request: Request, propose: Propose, lowered: Sequence[float]) -> list[Candidate]:
    """Of the cuts that a planner proposes, in several orders of branches, those that keep their caps in their
    simulated step. Where none does: of what it proposes under lower caps.

    Residuals are freed only where caps are tight: weighing a stage takes longer then.
    lowered: shares of the caps.
    """
    stages = len(request.cluster.devices)
    orders = request.branch_orders(stages)
    searches = [replace(request.search(order), by_depth=True) for order in orders]
    kept = _that_fit(request, [replace(search, treatments=()) for search in searches], propose, (1.0,))
    if any(search.optimises for search in searches) and not any(map(_has_room, kept)):
        kept += _that_fit(request, searches, propose, (1.0, *lowered))
    return kept or _that_fit(
        request, [replace(search, treatments=()) for search in searches], propose, lowered
    )


def _has_room(candidate: Candidate) -> bool:
    timeline, caps = candidate.timeline, candidate.search.caps
    return all(timeline.peak_bytes(rank) < NEARLY_FULL * cap for rank, cap in enumerate(caps))


def _that_fit(
    request: Request, searches: Sequence[Search], propose: Propose, shares: Sequence[float]
) -> list[Candidate]:
    """What keeps the caps of what is proposed under the first of some shares of them where anything does."""
    for share in shares:
        candidates = [
            Candidate(request, search, cuts)
            for search in searches
            for cuts in propose(scale_caps(search, share))
        ]
        if kept := [found for found in candidates if found.fits and found.tighter() is None]:
            return kept
    return []


HUGE = 4_000
"""Ops beyond which a plan for a DAG of stages is made in seconds: of cuts at a few places, in one order of
branches, none of them moved by the simulated step."""

SLACKS = (1, 2, 4)
"""Micro-batches in flight beyond the depth of a stage that are tried."""

POLISHED, MANY_POLISHED, FEW_OPS = 4, 12, 32
"""Candidates whose cuts are moved by the simulated step; many while there are at most `SMALL` ops."""


def with_slack(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best few candidates with more micro-batches in flight, where that keeps the caps."""
    few = sorted(candidates, key=step_s)[:POLISHED]
    more = (
        Candidate(replace(found.request, slack=slack), replace(found.search, by_depth=True), found.cuts)
        for found in few
        if found.depth < len(found.parts)
        for slack in (*SLACKS, len(found.parts))
        if slack <= len(found.parts)
    )
    return [found for found in more if found.fits and found.tighter() is None]


def fastest_of_few(request: Request, search: Search, propose: Propose) -> Candidate | None:
    """The fastest that keeps its caps of what a planner proposes, and of the best chain, for a huge graph."""
    searches = [(search, iter([search.fastest_of_few()]))]
    if request.options.branches:
        by_depth = replace(search, by_depth=True, treatments=())
        searches.append((by_depth, islice(propose(by_depth), 2)))
    candidates = [Candidate(request, each, cuts) for each, some in searches for cuts in some if cuts]
    kept = [found for found in candidates if found.fits and found.tighter() is None]
    if request.options.branches:
        kept += with_slack(kept)
    return min(kept, key=step_s, default=None)


def polish_some(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of what becomes of the best few, each polished in its own op order."""
    different: dict[tuple[Cuts, Cuts], Candidate] = {}
    for found in sorted(candidates, key=step_s):
        different.setdefault((found.search.model.readers.order, found.cuts), found)
    few = list(different.values())[
        : MANY_POLISHED if len(candidates[0].search.model) <= FEW_OPS else POLISHED
    ]
    return min((polish_cuts([found], found.search) for found in few), key=step_s)
