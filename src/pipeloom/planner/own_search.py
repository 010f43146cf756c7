"""Plans of one's own search: what it finds, simulated, until a candidate keeps its caps.

A search weighs stages, and estimates what they hold; only then is the step simulated. Where that passes a
cap, the search is made again with less memory, or with fewer ways to free it: `_attempts`.

What it finds under smaller caps is a candidate, too: it frees memory as far as caps ask for it, so that with
less room it may find a cut with a faster step. Such caps are powers of one number, whatever cap was asked
for, so that under a larger cap no plan is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import floor, log2
from operator import ge, le
from typing import TypeAlias

import numpy as np

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError
from ..ir.memory_policy import LEAST_AT_ONCE, Treatment
from ..ir.plan import Plan
from .candidate import Candidate, Room, step_s
from .fit_caps import fit_caps, more_held
from .joint.estimates import ClosedForm, CutTimes, climb, level_starts
from .refusals import (
    does_not_fit,
    explain_infeasible,
    finds_no_chain,
    passes_caps,
    refuse_nonsense,
    scale_caps,
    stage_needs,
    state_passes_caps,
    too_many_stages,
)
from .request import Request
from .search.cut_search import Search
from .search.problem import Cuts
from .strategies.graph_chains import Arranged

ROUNDS = 5
"""Searches until the schedule and the simulated peaks of the found cut agree with what was searched with; of
large graphs all that are made."""

ROUNDS_TOGETHER = 16
"""All searches where ranks have several stages, each of which takes longer."""

LOWERED = (0.95, 0.9, 0.8, 0.7)
"""Shares of all caps that are searched with where that does not come to an end, or nothing keeps them."""

PER_DOUBLING = 4
"""Smaller caps between one and its double."""


@dataclass
class SearchLog:
    """What a search came across, for whoever says why it found nothing.

    first_cuts: () if it found none.  search: in whose op order they are.  candidates: simulated since.
    no_chain: it counts memory in a way of its own, by which nothing fits.
    """

    first_cuts: Cuts = ()
    search: Search | None = None
    candidates: list[Candidate] = field(default_factory=list)
    no_chain: bool = False


Cut: TypeAlias = Callable[[Request, Search], tuple[Search, Cuts]]
"""What finds cuts, () where nothing fits, and the search in whose op order they are."""


@dataclass(frozen=True)
class OwnSearch:
    """Plans of one search, for the schedule that was asked for.

    keeps_caps: it looks at memory by itself.  arranges: a chain in an op order of its own, of which there is
    but one candidate.  even: where ranks have several stages it begins with cuts whose ranks take equally
    long.
    """

    cut: Cut
    keeps_caps: bool = True
    arranges: bool = False
    even: bool = False

    def __call__(self, request: Request, *, explained: bool) -> Plan:
        """Raises: as `make_plan`."""
        refuse_nonsense(request.graph, request.cluster, request.options.ranks, request.schedule)
        if self.arranges:
            request = replace(request, options=replace(request.options, branches=False))
        request.refuse_what_cannot_be()
        return fewer_at_once_if_need_be(self._plan, request, explained=explained)

    def _plan(self, request: Request, *, explained: bool) -> Plan:
        count = request.layout.stages
        if count > (places := len(request.models[0].cut_points) - 1):
            together = "ops of a module" if request.graph.whole else "ops that share an updated buffer"
            why = f"{count} stages, but {together} stay together, which leaves {places}"
            ranks = len(request.cluster.devices)
            raise too_many_stages(why, places, request.schedule, ranks, request.cluster)
        search, log = request.search(), SearchLog()
        if state_passes_caps(request.graph, request.cluster, request.options.sharing):
            raise refusal(request, search, log, explained=explained)
        found = self.find(request, search, log)
        if not found:
            raise refusal(request, search, log, explained=explained)
        return found[0].plan()

    def find(
        self, request: Request, search: Search, log: SearchLog, *, roomy: int | None = None
    ) -> list[Candidate]:
        """Candidates that keep their caps, the fastest first; if any plan will do, the first. roomy: no
        smaller caps are tried where caps are so many times what the best needs."""
        found = self._found(request, search, log)
        if not request.options.fastest or search.large:
            return found
        best = found[0] if found else None
        if roomy and _keeps(best, _scaled(request.cluster, 1 / roomy)):
            return found
        smaller = next((one for one in _smaller_caps(request.cluster) if not _keeps(best, one)), None)
        if smaller is not None:
            less = replace(request, cluster=smaller)
            for one in self._found(less, less.search(), SearchLog())[:1]:
                again = Candidate(request, one.search, one.cuts, Room(one.room, one.treated))
                found += [again] if again.keeps_caps else []
        return sorted(found, key=step_s)

    def _found(self, request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        found = level_candidates(request, search) if self.even and not request.layout.in_line else []
        if not found or request.options.fastest:
            found += self.candidates(request, search, log)
        return sorted(found, key=step_s)

    def candidates(self, request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        """The first candidate; of a schedule that fits the caps those for all that a stage may be taken to
        hold, the fastest first."""
        found = self._first(request, search, log)
        if request.fits_caps and all(candidate.leaving for candidate in found):
            for other in more_held(request, search):
                found += self._first(request, other, SearchLog())
        return sorted(found, key=step_s)

    def _first(self, request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        """The first candidate that keeps its caps, if any."""
        log.search, log.first_cuts = search, cuts = self.cut(request, search)
        log.no_chain = self.arranges and not cuts
        if not self.fits(search, cuts):
            return []
        rounds = ROUNDS if search.large else None if request.layout.in_line else ROUNDS_TOGETHER
        first = fit_caps(request, search, cuts)
        for candidate in islice(_attempts(first, self), 1 if self.arranges else rounds):
            log.candidates.append(candidate)
            if candidate.keeps_caps:
                return [candidate]
        return []

    def fits(self, search: Search, cuts: Cuts) -> bool:
        """Whether there are cuts, and their stages keep the caps by estimate."""
        if not cuts or self.keeps_caps:
            return bool(cuts)
        return all(need <= cap for need, cap in zip(stage_needs(search, cuts), search.caps, strict=True))


def by_cuts(find: Callable[[Search], Cuts], *, keeps_caps: bool = True, even: bool = False) -> OwnSearch:
    """A planner that cuts the op order.

    find: cut positions, 0 and the number of ops included; () where nothing fits.  keeps_caps, even: see
    `OwnSearch`.
    """
    return OwnSearch(lambda request, search: (search, find(search)), keeps_caps, even=even)


def by_order(arrange: Callable[[Search], Arranged | None], *, keeps_caps: bool = True) -> OwnSearch:
    """A planner of a chain in an op order of its own. arrange: None where nothing fits."""

    def cut(request: Request, search: Search) -> tuple[Search, Cuts]:
        order, cuts = arrange(search) or (None, ())
        return (search if order is None else request.search(order)), cuts

    return OwnSearch(cut, keeps_caps, arranges=True)


def level_candidates(request: Request, search: Search) -> list[Candidate]:
    """Of cuts whose ranks take equally long, from several starts, those that keep their caps."""
    found = list[Candidate]()
    for bare in level_starts(request.layout):
        find = partial(_level_cut, request=request, bare=bare)
        found += by_cuts(find).candidates(request, search, SearchLog())
    return sorted(found, key=step_s)


def _level_cut(search: Search, *, request: Request, bare: int) -> Cuts:
    everywhere = search.model.cut_points.tolist()
    cuts = CutTimes(search, request.layout, request.microbatches, weighed=True, also=everywhere)
    form, places = ClosedForm(cuts), cuts.evenly(bare)
    best = [] if places is None else climb(form, places)[:1]
    return cuts.cut(best[0]) if best and np.isfinite(form.steps(best[0][None])[0]) else ()


def _smaller_caps(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the memory of each device rounded down to a power, then one power less each time."""
    powers = [floor(PER_DOUBLING * log2(device.memory_bytes)) for device in cluster.devices]
    for less in range(min(powers)):
        yield cluster.with_memory([int(2 ** ((power - less) / PER_DOUBLING)) for power in powers])


def _scaled(cluster: Cluster, share: float) -> Cluster:
    return cluster.with_memory([int(share * device.memory_bytes) for device in cluster.devices])


def _keeps(found: Candidate | None, cluster: Cluster) -> bool:
    return found is not None and all(
        found.timeline.peak_bytes(rank) <= device.memory_bytes for rank, device in enumerate(cluster.devices)
    )


def refusal(request: Request, search: Search, log: SearchLog, *, explained: bool) -> InfeasibleError:
    """The error where no planner has a candidate that fits. explained: see `make_plan`."""
    if log.candidates:
        closest = min(log.candidates, key=lambda candidate: sum(candidate.over))
        if closest.host_shortage is not None and not any(closest.over):
            return InfeasibleError(
                f"no cut found keeps the host's memory with {request.schedule}: {closest.host_shortage}"
            )
        return passes_caps(closest.over, request.cluster, request.schedule)
    if log.first_cuts:
        return does_not_fit(log.search or search, log.first_cuts, request.options.planner)
    if log.no_chain:
        return finds_no_chain(search, request.options.planner)
    if explained:
        return explain_infeasible(search, request.wider)
    return InfeasibleError(f"no cut into {len(search.caps)} stages fits")


def fewer_at_once_if_need_be(plan: Callable[..., Plan], request: Request, *, explained: bool) -> Plan:
    """The plan that is asked for; where nothing fits, that with fewer micro-batches of a stage that offloads
    on the device at once. plan: of a request.  Raises: as it."""
    if (fewer := fewer_at_once(request)) is None:
        return plan(request, explained=explained)
    try:
        return plan(request, explained=False)
    except InfeasibleError:
        return plan(fewer, explained=explained)


def fewer_at_once(request: Request) -> Request | None:
    """None where nothing may be offloaded, or no fewer do."""
    options = request.options
    if "offload" not in request.treatments or options.offloaded_at_once == LEAST_AT_ONCE:
        return None
    fewer = replace(options, offloaded_at_once=LEAST_AT_ONCE)
    return replace(request, options=fewer, only_offloading=True)


def _attempts(first: Candidate, by: OwnSearch) -> Iterator[Candidate]:
    """Cuts to simulate until one keeps its caps there, as the model of a stage has estimated: first with the
    caps of the ranks that passed theirs lowered by that; then with all caps lowered alike, as far as a cut is
    found; then with fewer ways to free memory, whose estimates are simpler."""
    request, search = first.request, first.search
    failed: list[Search] = []

    def attempt(search: Search) -> Candidate | None:
        if fails_again(search, failed):
            return None
        _, cuts = by.cut(request, search)
        if not by.fits(search, cuts):
            failed.append(search)
            return None
        return fit_caps(request, search, cuts)

    yield first
    for treatments in _fewer_treatments(search.treatments):
        if request.only_offloading and "offload" not in treatments:
            break
        in_flight = tuple(map(max, first.in_flight, search.in_flight))
        relaxed = replace(search, treatments=treatments, in_flight=in_flight)
        following = _tighter_search(first) if treatments == search.treatments else relaxed
        last = relaxed
        for _ in range(ROUNDS):
            if (candidate := attempt(following)) is None:
                break
            yield candidate
            last = following = _tighter_search(candidate)
        for lower in _lowered(first, relaxed, last):
            if candidate := attempt(lower):
                yield candidate


def _lowered(first: Candidate, relaxed: Search, last: Search) -> Iterator[Search]:
    """Searches with all caps lowered alike.  last: the one before, whose stages fill their ranks together,
    where several are on each."""
    yield from (scale_caps(relaxed if first.layout.in_line else last, share) for share in LOWERED)
    if not first.layout.in_line:
        even = 1 / max(map(len, first.layout.held))
        yield from (scale_caps(relaxed, even * share) for share in (1.0, *LOWERED[1::2]))


def _tighter_search(candidate: Candidate) -> Search:
    """The search to repeat; the same where only the host's memory is passed, which lower caps do not help."""
    return candidate.tighter() or candidate.search


def _fewer_treatments(treatments: tuple[Treatment, ...]) -> list[tuple[Treatment, ...]]:
    without = tuple(t for t in treatments if t != "offload")
    return list(dict.fromkeys((treatments, without, ())))


def fails_again(search: Search, failed: Sequence[Search]) -> bool:
    """Whether a search need not be made, as others, in the same model, found no cut: one of them had no less
    memory, no more micro-batches in flight and all its ways to free memory."""
    return any(
        set(search.treatments) <= set(other.treatments)
        and all(map(le, search.caps, other.caps))
        and all(map(ge, search.in_flight, other.in_flight))
        for other in failed
    )
