"""make_plan: OpGraph x Profile x Cluster -> Plan, by any planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError, PlanError, shown
from ..ir.graph import OpGraph
from ..ir.memory_policy import Treatment
from ..ir.plan import Plan
from ..ir.profile import Profile
from .candidate import Found
from .infeasible import does_not_fit, explain_infeasible, needs, passes_caps, scaled
from .registry import Planner, planner
from .request import PlanOptions, Request
from .search import Search, polished
from .stage_cost import Wiring


class TooManyStages(PlanError):
    """The model cannot be cut into so many. places: the most that it can."""

    def __init__(self, message: str, *, hint: str | None = None, places: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.places = places


ROUNDS = 5
"""Searches until the schedule and the simulated peaks of the found cut agree with what was searched with; of
large graphs all that are made."""

LOWERED = (0.95, 0.9, 0.8, 0.7)
"""Shares of all caps that are searched with where that does not come to an end."""


def make_plan(
    graph: OpGraph,
    profile: Profile | Mapping[str, Profile],
    cluster: Cluster,
    *,
    stages: int,
    schedule: str,
    microbatches: int,
    strategy: str = "exact",
    options: PlanOptions = PlanOptions(),  # noqa: B008  frozen
    explained: bool = True,
    watch: Callable[[int], None] | None = None,
) -> Plan:
    """Cut a graph into stages, stage s on device s.

    profile: costs per micro-batch, for all devices or by device name.
    schedule: see `schedules.names`.  microbatches: per step.  strategy: see `planner.names`.
    explained: if nothing fits, look for how far it is from fitting, which takes longer.
    watch: told how many stages were weighed so far.
    Raises: PlanError if the request makes no sense; InfeasibleError if nothing fits under the devices'
        memory.
    """
    _refuse_nonsense(graph, cluster, stages)
    known = planner(strategy)
    used = replace(cluster, devices=cluster.devices[:stages])
    request = Request(graph, profile, used, schedule, microbatches, options, known, watch)
    request.refuse_what_cannot_be()
    search = request.search(stages)
    if stages > (places := len(search.model.cut_points) - 1):
        raise TooManyStages(
            f"{stages} stages, but ops that share an updated buffer stay together, which leaves {places}",
            hint=_at_most(places, cluster),
            places=places,
        )
    tried = _Tried()
    kept = []
    planners = (known, *map(planner, known.also))
    for other in planners if options.fastest else reversed(planners):
        own = search if other is known else _search_of(search, request, other)
        if (found := _kept(request, own, other, tried if other is known else _Tried())) is not None:
            kept.append(found)
            if not options.fastest:
                return found.plan(strategy)
    if not kept:
        raise _refusal(request, search, tried, strategy, explained)
    return (polished(kept, search) if known.polishes else kept[0]).plan(strategy)


@dataclass
class _Tried:
    """What a planner found on the way: its first cuts, () if none; and all that was simulated."""

    cuts: tuple[int, ...] = ()
    found: list[Found] = field(default_factory=list)


def _search_of(search: Search, request: Request, other: Planner) -> Search:
    """The search of another planner for the same."""
    return replace(
        search,
        treatments=() if other.optimises == "never" else search.treatments,
        layers=request.layers if other.granularity == "layer" else {},
    )


def _kept(request: Request, search: Search, known: Planner, tried: _Tried) -> Found | None:
    """The first cut of a planner that keeps its caps, its step simulated. tried: what it found, to fill."""
    tried.cuts = known.find(search)
    if not tried.cuts or (not known.keeps_caps and _over(search, tried.cuts)):
        return None
    most = ROUNDS if search.large else None
    for found in islice(_candidates(Found(request, search, tried.cuts), known), most):
        tried.found.append(found)
        if found.tighter() is None:
            return found
    return None


def _refusal(
    request: Request,
    search: Search,
    tried: _Tried,
    strategy: str,
    explained: bool,
) -> InfeasibleError:
    """The error where no planner found anything. explained: see `make_plan`."""
    if tried.found:
        closest = min(tried.found, key=lambda found: sum(found.over))
        return passes_caps(closest.over, request.cluster, request.schedule)
    if tried.cuts:
        return does_not_fit(search, tried.cuts, strategy)
    if explained:
        return explain_infeasible(search, request.wider)
    return InfeasibleError(f"no cut into {len(search.caps)} stages fits")


def _candidates(first: Found, known: Planner) -> Iterator[Found]:
    """Cuts to simulate until one keeps its caps there, as the model of a stage has estimated: first with the
    caps of the ranks that passed theirs lowered by that; then with all caps lowered alike, as far as a cut is
    found; then with fewer ways to free memory, whose estimates are simpler."""
    request, search = first.request, first.search
    yield first
    for treatments in _fewer(search.treatments):
        most = tuple(map(max, first.in_flight, search.in_flight))
        own = replace(search, treatments=treatments, in_flight=most)
        next_one = _tighter(first) if treatments == search.treatments else own
        for _ in range(ROUNDS):
            if (found := _found(request, next_one, known)) is None:
                break
            yield found
            next_one = _tighter(found)
        for share in LOWERED:
            if found := _found(request, scaled(own, share), known):
                yield found


def _tighter(found: Found) -> Search:
    tighter = found.tighter()
    assert tighter is not None, "whoever asks for the next one has seen this one pass a cap"
    return tighter


def _found(request: Request, search: Search, known: Planner) -> Found | None:
    cuts = known.find(search)
    if not cuts or (not known.keeps_caps and _over(search, cuts)):
        return None
    return Found(request, search, cuts)


def _fewer(treatments: tuple[Treatment, ...]) -> list[tuple[Treatment, ...]]:
    """All of them, without offloading, and none."""
    without = tuple(t for t in treatments if t != "offload")
    return list(dict.fromkeys((treatments, without, ())))


def _over(search: Search, cuts: tuple[int, ...]) -> bool:
    """Whether a stage of a cut holds more than its cap."""
    return any(need > cap for need, cap in zip(needs(search, cuts), search.caps, strict=True))


def _refuse_nonsense(graph: OpGraph, cluster: Cluster, stages: int) -> None:
    ops = sum(not op.cheap for op in graph.ops)
    if stages < 1:
        raise PlanError(f"{stages} stages", hint="use at least 1")
    if stages > ops:
        places = len(Wiring(graph).cut_points) - 1
        raise TooManyStages(
            f"{shown(stages)} stages for {ops} ops", hint=_at_most(places, cluster), places=places
        )
    if stages > len(cluster.devices):
        raise PlanError(
            f"{stages} stages for {len(cluster.devices)} devices", hint="use fewer stages, or add devices"
        )


def _at_most(places: int, cluster: Cluster) -> str:
    """What is advised where the model has too few places to be cut at: nothing that is refused next."""
    most = min(places, len(cluster.devices))
    return f"use at most {most} {'stages' if most > 1 else 'stage'}"
