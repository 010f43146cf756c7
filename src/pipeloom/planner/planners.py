"""Planners by name, composed of a few functions, and `make_plan`: OpGraph x Profile x Cluster -> Plan.

    ByCuts, ByOrder         what a search finds, simulated, until a candidate keeps its caps: `_attempts`
    searched, side_by_side  finders of candidates: of one search, and of stages that form a DAG
    evened                  before that, cuts whose ranks, and not whose stages, take equally long
    fastest                 with what planners named beside it find
    polished                cuts moved by the simulated step
    under_less              what the same finds under smaller caps, too
    or_in_a_row             the same with all stages in a chain, too

Two ways to make a plan stand above them:

    OneSchedule             the fastest candidate of a finder, for the schedule that was asked for
    JointPlanner                   the joint search, over everything
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice, product
from typing import Any

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.memory_policy import LEAST_AT_ONCE, Treatment
from ..ir.plan import Plan
from ..ir.profile import Profile
from .candidate import Candidate, step_s
from .joint.axes import AXES
from .joint.ledger import SearchLedger
from .joint.search import HOLD_LITTLE, JointSearch, Point
from .notes import faster_of
from .refine import (
    FEW_OPS,
    HUGE,
    Propose,
    fails_again,
    faster_under_less,
    fastest_of_few,
    fit_caps,
    more_held,
    polish_cuts,
    polish_some,
    shallow_candidates,
    with_slack,
)
from .refusals import (
    does_not_fit,
    explain_infeasible,
    finds_no_chain,
    fits,
    passes_caps,
    refuse_nonsense,
    scale_caps,
    stage_needs,
    state_passes_caps,
    too_many_stages,
)
from .request import Planner, PlanOptions, Request, SearchWatch
from .schedule_names import schedule_names
from .search.cut_search import Search
from .search.even_ranks import even_ranks
from .search.layer_groups import whole_modules
from .search.problem import Cuts
from .stage_cost.tensors import Readers
from .strategies.dawnpiper import dawnpiper
from .strategies.graph_chains import (
    Arranged,
    pipedream_graph_layers,
    pipedream_graph_ops,
    piper_layers,
    piper_ops,
)
from .strategies.graphpipe import shallow_cuts
from .strategies.pipedream import pipedream, pipedream_repo, vpipe
from .strategies.probe import filled, probe
from .strategies.simple import balanced, equal, exact

ROUNDS = 5
"""Searches until the schedule and the simulated peaks of the found cut agree with what was searched with; of
large graphs all that are made."""

ROUNDS_TOGETHER = 16
"""All searches where ranks have several stages, each of which takes longer."""

LOWERED = (0.95, 0.9, 0.8, 0.7)
"""Shares of all caps that are searched with where that does not come to an end."""

# --- finders ------------------------------------------------------------------------------------------


@dataclass
class SearchLog:
    """What a planner's own search came across, for whoever says why it found nothing.

    first_cuts: () if it found none.  search: in whose op order they are.  candidates: simulated since.
    no_chain: it counts memory in a way of its own, by which nothing fits.
    """

    first_cuts: Cuts = ()
    search: Search | None = None
    candidates: list[Candidate] = field(default_factory=list)
    no_chain: bool = False


@dataclass(frozen=True)
class ByCuts:
    """A search of cuts of the op order, repeated until a candidate keeps its caps.

    find: () where nothing fits.  keeps_caps: it looks at memory by itself.
    """

    find: Callable[[Search], Cuts]
    keeps_caps: bool = True

    def first(self, request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        """The first candidate that keeps its caps, if any."""
        log.first_cuts, log.search = self.find(search), search
        if not self.fit(search, log.first_cuts):
            return []
        rounds = ROUNDS if search.large else None if request.layout.in_line else ROUNDS_TOGETHER
        for candidate in islice(_attempts(fit_caps(request, search, log.first_cuts), self), rounds):
            log.candidates.append(candidate)
            if candidate.keeps_caps:
                return [candidate]
        return []

    def fit(self, search: Search, cuts: Cuts) -> bool:
        """Whether there are cuts, and their stages keep the caps by estimate."""
        if not cuts or self.keeps_caps:
            return bool(cuts)
        return all(need <= cap for need, cap in zip(stage_needs(search, cuts), search.caps, strict=True))


@dataclass(frozen=True)
class ByOrder:
    """A search of a chain in an op order of its own.

    arrange: None where nothing fits.  keeps_caps: it looks at memory by itself.
    """

    arrange: Callable[[Search], Arranged | None]
    keeps_caps: bool = True

    def first(self, request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        arranged = self.arrange(search)
        log.search, log.no_chain = search, arranged is None
        if arranged is None:
            return []
        order, cuts = arranged
        log.search, log.first_cuts = request.search(order), cuts
        if not ByCuts(lambda search: cuts, self.keeps_caps).fit(log.search, cuts):
            return []
        candidate = fit_caps(request, log.search, cuts)
        log.candidates.append(candidate)
        return [candidate] if candidate.keeps_caps else []


def each(by: ByCuts | ByOrder, request: Request, search: Search, log: SearchLog) -> list[Candidate]:
    """The first candidate; of a schedule that fits the caps those for all that a stage may be taken to hold,
    the fastest first."""
    found = by.first(request, search, log)
    if request.fits_caps and all(candidate.leaving for candidate in found):
        for other in more_held(request, search):
            found += by.first(request, other, SearchLog())
    return sorted(found, key=step_s)


@dataclass(frozen=True)
class Finder:
    """Finds candidates that keep their caps in their simulated step.

    find: (request, its search, the log of the own search, which is filled) -> them; none if it finds none.
    own: its own search, apart from what is done besides.  beside: planners whose candidates it has as well.
    of_dags: its stages may run side by side.
    """

    find: Callable[[Request, Search, SearchLog], list[Candidate]]
    own: ByCuts | ByOrder
    beside: tuple[str, ...] = ()
    of_dags: bool = False


def searched(own: ByCuts | ByOrder) -> Finder:
    return Finder(partial(each, own), own)


def side_by_side(propose: Propose) -> Finder:
    """Stages of a DAG: those of the proposed cuts that keep their caps."""

    def find(request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        return shallow_candidates(request, propose, LOWERED) if request.side_by_side else []

    return Finder(find, ByCuts(lambda search: next(propose(search), ())), of_dags=True)


def fastest(part: Finder, *also: str) -> Finder:
    """What a finder finds, and planners beside it, the slowest to search first. If any plan will do, the
    first of the last that finds one."""

    def find(request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        found: list[Candidate] = []
        names: list[str | None] = [None, *also]
        for name in names if request.options.fastest else reversed(names):
            if name is None:
                found += part.find(request, search, log)
            else:
                other, by = _search_of(search, request, planner(name)), finder_of(name).own
                found += each(by, request, other, log if part.of_dags else SearchLog())
            if found and not request.options.fastest:
                break
        return found

    return replace(part, find=find, beside=also)


def evened(part: Finder) -> Finder:
    """Where ranks have several stages, first cuts whose ranks take equally long (even_ranks.py), then what
    may be faster than these."""

    def find(request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        found = [] if request.layout.in_line else _even_candidates(request, search)
        if found and not request.options.fastest:
            return found
        return found + part.find(_below(request, found), search, log)

    return replace(part, find=find)


def polished(part: Finder) -> Finder:
    """The fastest candidate, its cuts moved by the simulated step."""

    def find(request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        found = part.find(request, search, log)
        return [polish_cuts(found, search)] if found and request.options.fastest else found

    return replace(part, find=find)


def polished_side_by_side(part: Finder, propose: Propose) -> Finder:
    """The same of stages of a DAG, of several candidates; of a huge graph the fastest of a few cuts as it
    is."""

    def find(request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        if len(search.model) > HUGE and (few := fastest_of_few(request, search, propose)) is not None:
            return [few]  # if there is none, caps are tight: then it takes long
        if not (request.side_by_side and request.options.fastest):
            return polished(part).find(request, search, log)
        found = part.find(request, search, log)
        return [polish_some([*found, *with_slack(found)])] if found else []

    return replace(part, find=find)


def under_less(part: Finder) -> Finder:
    """The best candidate, or, of small graphs, what is found under smaller caps, as that takes another
    search."""

    def find(request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        found = part.find(request, search, log)
        if not request.options.fastest or search.large:
            return found

        def again(less: Request) -> Candidate | None:
            return min(part.find(less, less.search(), SearchLog()), key=step_s, default=None)

        best = faster_under_less(request, min(found, key=step_s, default=None), again)
        return [] if best is None else [best]

    return replace(part, find=find)


def or_in_a_row(part: Finder) -> Finder:
    """The fastest candidate, or the fastest whose stages run one after another, and notes on both."""

    def find(request: Request, search: Search, log: SearchLog) -> list[Candidate]:
        found = part.find(request, search, log)
        if not (request.side_by_side and request.options.fastest):
            return found
        in_a_row = replace(request, options=replace(request.options, branches=False))
        row = part.find(in_a_row, search, log)
        best = faster_of(*(min(some, key=step_s, default=None) for some in (found, row)))
        return [] if best is None else [best]

    return replace(part, find=find)


def _search_of(search: Search, request: Request, other: Planner) -> Search:
    return replace(
        search,
        treatments=search.treatments if other.optimises == "always" else (),
        layers=request.layers if other.granularity == "layer" else {},
    )


def _even_candidates(request: Request, search: Search) -> list[Candidate]:
    """Of cuts whose ranks take equally long, from several starts, those that keep their caps."""
    layout, found = request.layout, list[Candidate]()
    others = layout.stages - layout.ranks  # than one stage on each rank
    all_alike, last_on_ranks, first_on_ranks = 0, others, -others  # which stages share out what is not bare
    for bare in dict.fromkeys((all_alike, last_on_ranks, first_on_ranks)):
        find = partial(even_ranks, placement=layout.placement, microbatches=request.microbatches, bare=bare)
        found += each(ByCuts(find), request, search, SearchLog())
        request = _below(request, found)
    return sorted(found, key=step_s)


def _below(request: Request, found: Sequence[Candidate]) -> Request:
    """The request for what may be faster than what was found."""
    below_s = min([request.below_s, *map(step_s, found)])
    return request if below_s == request.below_s else replace(request, below_s=below_s)


def _attempts(first: Candidate, by: ByCuts) -> Iterator[Candidate]:
    """Cuts to simulate until one keeps its caps there, as the model of a stage has estimated: first with the
    caps of the ranks that passed theirs lowered by that; then with all caps lowered alike, as far as a cut is
    found; then with fewer ways to free memory, whose estimates are simpler. No more of those with which a
    step takes longer than it may."""
    request, search = first.request, first.search
    failed: list[Search] = []

    def attempt(search: Search) -> Candidate | None:
        if fails_again(search, failed):
            return None
        cuts = by.find(search)
        if not by.fit(search, cuts):
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
        slow = step_s(first) > request.below_s
        for _ in range(ROUNDS):
            if slow or (candidate := attempt(following)) is None:
                break
            yield candidate
            slow = step_s(candidate) > request.below_s
            last = following = _tighter_search(candidate)
        for lower in _lowered(first, relaxed, last):
            if not slow and (candidate := attempt(lower)):
                yield candidate
                slow = step_s(candidate) > request.below_s


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


# --- plans --------------------------------------------------------------------------------------------


def fewer_at_once_if_need_be(plan: Callable[..., Plan], request: Request, *, explained: bool) -> Plan:
    """The plan that is asked for; where nothing fits, that with fewer micro-batches of a stage that offloads
    on the device at once. plan: of a request.  Raises: as it."""
    if (fewer := _fewer_at_once(request)) is None:
        return plan(request, explained=explained)
    try:
        return plan(request, explained=False)
    except InfeasibleError:
        return plan(fewer, explained=explained)


def _fewer_at_once(request: Request) -> Request | None:
    """None where nothing may be offloaded, or no fewer do."""
    options = request.options
    if "offload" not in request.treatments or options.offloaded_at_once == LEAST_AT_ONCE:
        return None
    fewer = replace(options, offloaded_at_once=LEAST_AT_ONCE)
    return replace(request, options=fewer, only_offloading=True)


@dataclass(frozen=True)
class OneSchedule:
    finder: Finder

    def __call__(self, request: Request, *, explained: bool) -> Plan:
        """Raises: as `make_plan`."""
        refuse_nonsense(request.graph, request.cluster, request.options.ranks, request.schedule)
        if isinstance(self.finder.own, ByOrder):
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
            raise _refusal(request, search, log, explained=explained)
        best = min(self.finder.find(request, search, log), key=step_s, default=None)
        if best is None:
            raise _refusal(request, search, log, explained=explained)
        return best.plan()


def _refusal(request: Request, search: Search, log: SearchLog, *, explained: bool) -> InfeasibleError:
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


@dataclass(frozen=True)
class JointPlanner:
    """The joint search (joint/search.py).

    schedules: those that are tried where none is named; None for all of the library.
    axes: by name, of `AXES`; () for all.  planners: whose cuts it begins with; () for all.
    orders: whether orders are tried that are no schedule of the library.
    """

    schedules: Callable[[Request], tuple[str, ...]] | None = None
    axes: tuple[str, ...] = ()
    planners: tuple[str, ...] = ()
    orders: bool = True

    def __call__(self, request: Request, *, explained: bool) -> Plan:
        """Raises: as `make_plan`."""
        options = request.options
        if self.schedules is not None and options.schedule is None and not options.schedules:
            request = replace(request, options=replace(options, schedules=self.schedules(request)))
        schedule = (request.options.schedules or (options.named_schedule,))[0]
        refuse_nonsense(request.graph, request.cluster, options.ranks, schedule)
        if not options.fastest:
            return self._any(request, schedule, explained=explained)
        return fewer_at_once_if_need_be(self._search, request, explained=explained)

    def _search(self, request: Request, *, explained: bool) -> Plan:
        axes = {name: AXES[name] for name in self.axes or AXES}
        search = JointSearch(request, axes, self.seeds, make_room, orders=self.orders, explained=explained)
        return search.run()

    def seeds(self, request: Request, ledger: SearchLedger) -> Iterator[tuple[str, Point]]:
        """What the own searches of all planners find, for one stage on each rank; `exact` for several."""
        if not request.layout.in_line:
            with suppress(PlanError, ScheduleError):
                found = _exact_candidates(request)
                yield from (("exact", Point(one.request, one.search, one.cuts)) for one in found)
            return
        for name in self.planners or PLANNERS:
            by = planner(name)
            if not isinstance(by.plan, OneSchedule):
                continue
            finder, search = by.plan.finder, _search_of(request.search(), request, by)
            try:
                many = isinstance(finder.own, ByOrder) and len(search.model) > FEW_OPS
                many |= request.layout.stages > MANY_STAGES and name not in QUICK
                if many or (search.large and name not in SEEDS_OF_LARGE):
                    ledger.note(ledger.planners, name, f"not asked about {len(search.model)} ops")
                elif finder.of_dags:
                    yield from _side_by_side_seeds(name, request)
                elif isinstance(finder.own, ByOrder):
                    if (arranged := finder.own.arrange(search)) is not None:
                        yield name, Point(request, request.search(arranged[0]), arranged[1])
                else:
                    few = search.large and name == "exact"
                    if cuts := search.fastest_of_few() if few else finder.own.find(search):
                        yield name, Point(request, search, cuts)
                    else:
                        ledger.note(ledger.planners, name, "no cut fits")
            except PlanError as error:
                ledger.note(ledger.planners, name, error.message)

    def _any(self, request: Request, schedule: str, *, explained: bool) -> Plan:
        """The first plan that keeps the caps. Raises: as `make_plan`."""
        first: PlanError | None = None
        own, small = request.options.schedules, len(request.graph.ops) <= SMALL
        least = HOLD_LITTLE if small and not own and request.options.schedule is None else ()
        schedules = dict.fromkeys((schedule, *own, *least))
        for name, by in product(schedules, FREEING):
            options = replace(request.options, planner=by, schedule=name, schedules=(), fastest=False)
            way = replace(request, options=options, planner=planner(by))
            try:
                found = way.planner.plan(way, explained=explained and first is None)
                return replace(found, planner=request.options.planner)
            except (PlanError, ScheduleError) as error:
                if first is None and isinstance(error, PlanError):
                    first = error
        raise first or PlanError("no schedule to choose from", hint="name at least one")


def make_room(request: Request, ledger: SearchLedger, *, explained: bool) -> Iterator[tuple[str, Point]]:
    """Cuts that keep the caps: of ranks that take equally long, by filling stage after stage, or with stages
    side by side. Raises: as `make_plan`."""
    asked, request = request, replace(request, options=replace(request.options, fastest=False))
    search, log = request.search(), SearchLog()
    fill = ByCuts(lambda search: search.problem.positions(filled(search.problem)))
    finder = finder_of(FREEING[0]) if request.copies else evened(searched(fill))
    kept = finder.find(request, search, log) if request.copies or fits(search) else []
    if not kept and request.side_by_side:
        kept = shallow_candidates(request, shallow_cuts, LOWERED)
    if not kept:
        raise _refusal(request, search, log, explained=explained)
    yield from (("filled", Point(asked, found.search, found.cuts)) for found in kept)


FREEING = ("dawnpiper", "graphpipe")
"""Planners that are asked, in full, where the joint search finds nothing that keeps the caps."""


def offloading_schedules(request: Request) -> tuple[str, ...]:
    """Those that PipeOffload leaves to its user, see schedule_names.py."""
    places = len(Readers(request.graph).cut_points) - 1
    return schedule_names(len(request.cluster.devices), places, copies=request.may_offload)


SMALL = 200
"""Ops up to which they are asked with the schedules that hold little, too."""

QUICK = ("balanced", "equal")
"""Planners that take no time whatever they are asked."""

SEEDS_OF_LARGE = ("exact", "graphpipe", *QUICK)
"""Planners that are asked about graphs of many ops."""

MANY_STAGES = 100
"""Stages from which on only quick planners are asked."""


def _exact_candidates(request: Request) -> list[Candidate]:
    """Where there are none, those with fewer micro-batches on the device at once.

    Raises: PlanError, ScheduleError.
    """
    find = finder_of("exact").find
    found = find(request, request.search(), SearchLog())
    if not found and (fewer := _fewer_at_once(request)) is not None:
        found = find(fewer, fewer.search(), SearchLog())
    return found


def _side_by_side_seeds(name: str, request: Request) -> Iterator[tuple[str, Point]]:
    for order in request.orders_to_try[:2] if request.side_by_side else ():
        search = replace(request.search(order), by_depth=True, treatments=())
        yield from ((name, Point(request, search, cuts)) for cuts in islice(shallow_cuts(search), 2))


def make_plan(
    graph: OpGraph,
    profile: Profile | Mapping[str, Profile],
    cluster: Cluster,
    options: PlanOptions = PlanOptions(),  # noqa: B008  frozen
    *,
    explained: bool = True,
    watch: SearchWatch | None = None,
    **changes: Any,
) -> Plan:
    """Cut a graph into stages, for the usual placement of a schedule.

    profile: costs per micro-batch, for all devices or by device name.
    changes: of the options.
    explained: if nothing fits, look for how far it is from fitting, which takes longer.
    watch: told how the search goes on.
    Raises: PlanError if the request makes no sense; InfeasibleError if nothing fits under the devices'
        memory.
    """
    options = options.changed(**changes)
    modules = whole_modules(graph.ops)
    if options.granularity == "module":
        everything = tuple(op.name for op in graph.ops)
        graph = replace(graph, whole=tuple(module.together for module in modules) or (everything,))
    devices = replace(cluster, devices=cluster.devices[: options.ranks])
    request = Request(graph, profile, devices, options, planner(options.planner), watch)
    plan = request.planner.plan(request, explained=explained)
    return replace(plan, modules={one.name: (one.ops[0], one.ops[-1]) for one in modules})


# --- the table ----------------------------------------------------------------------------------------


def by_cuts(find: Callable[[Search], Cuts], *, keeps_caps: bool = True) -> OneSchedule:
    """A planner that cuts the op order.

    find: cut positions, 0 and the number of ops included; () where nothing fits.  keeps_caps: it looks at
    memory by itself.
    """
    return OneSchedule(under_less(searched(ByCuts(find, keeps_caps))))


def _evened(find: Callable[[Search], Cuts]) -> OneSchedule:
    return OneSchedule(under_less(evened(searched(ByCuts(find)))))


def _by_order(arrange: Callable[[Search], Arranged | None], *, keeps_caps: bool = True) -> OneSchedule:
    return OneSchedule(under_less(searched(ByOrder(arrange, keeps_caps))))


PLANNERS: dict[str, Planner] = {
    "auto": Planner(
        plan=JointPlanner(),
        granularity="op",
        optimises="always",
        source="this project",
        about="one search over cuts, schedules, device orders and what is freed, from what all others find",
    ),
    "exact": Planner(
        plan=_evened(exact),
        granularity="op",
        optimises="asked",
        source="dynamic programming",
        about="of all cuts that whose slowest stage is fastest; slow where residuals are optimised",
    ),
    "dawnpiper": Planner(
        plan=OneSchedule(
            under_less(polished(evened(fastest(searched(ByCuts(dawnpiper)), "probe", "vpipe", "pipedream"))))
        ),
        granularity="op",
        optimises="always",
        source="arXiv 2505.05856, reconstructed from the abstract; and more",
        about="dawnpiper-alone, probe, vpipe, pipedream; the best, its cuts moved by the simulated step",
    ),
    "pipeoffload": Planner(
        plan=JointPlanner(
            schedules=offloading_schedules, axes=("cuts", "schedules", "treatments"), orders=False
        ),
        granularity="op",
        optimises="always",
        source="arXiv 2503.01328 leaves the choice to its user",
        about="the fastest of many schedules that fits, with and without offloading",
    ),
    "dawnpiper-alone": Planner(
        plan=_evened(dawnpiper),
        granularity="op",
        optimises="always",
        source="arXiv 2505.05856, reconstructed from the abstract",
        about="halves the stages and bisects between balanced compute and balanced memory",
    ),
    "probe": Planner(
        plan=_evened(probe),
        granularity="op",
        optimises="always",
        source="Pinar and Aykanat 2004, JPDC 64(8)",
        about="parametric search; exact where transfers cost nothing",
    ),
    "graphpipe": Planner(
        plan=OneSchedule(
            or_in_a_row(
                under_less(
                    polished_side_by_side(
                        evened(fastest(side_by_side(shallow_cuts), "exact", "probe")), shallow_cuts
                    )
                )
            )
        ),
        granularity="op",
        optimises="always",
        source="arXiv 2406.17145, reconstructed: stages as a DAG",
        about="towers side by side: the least bottleneck, then the shallowest pipeline; exact, probe",
    ),
    "vpipe": Planner(
        plan=by_cuts(vpipe),
        granularity="layer",
        optimises="always",
        source="TPDS 33(3) 2022, vPipe-like",
        about="moves layers over boundaries, treats the residuals of a layer alike",
    ),
    "pipedream": Planner(
        plan=by_cuts(pipedream, keeps_caps=False),
        granularity="module",
        source="SOSP 2019, as in the paper",
        about="balances compute and transfers by modules",
    ),
    "pipedream-repo": Planner(
        plan=by_cuts(pipedream_repo, keeps_caps=False),
        granularity="module",
        source="msr-fiddle/pipedream",
        about="balances compute by modules, transfers not counted",
    ),
    "pipedream-graph": Planner(
        plan=_by_order(pipedream_graph_layers, keeps_caps=False),
        granularity="layer",
        source="msr-fiddle/pipedream, over antichains",
        about="balances compute and transfers by layers of the whole graph, for a chain of stages",
    ),
    "pipedream-graph-ops": Planner(
        plan=_by_order(pipedream_graph_ops, keeps_caps=False),
        granularity="op",
        source="msr-fiddle/pipedream, over antichains",
        about="the same by ops, for small graphs",
    ),
    "piper": Planner(
        plan=_by_order(piper_layers),
        granularity="layer",
        source="NeurIPS 2021, over pairs of down-sets",
        about="the least compute and transfers under the caps by layers of the whole graph, for a chain",
    ),
    "piper-ops": Planner(
        plan=_by_order(piper_ops),
        granularity="op",
        source="NeurIPS 2021, over pairs of down-sets",
        about="the same by ops, for small graphs",
    ),
    "equal": Planner(
        plan=by_cuts(equal, keeps_caps=False),
        granularity="layer",
        source="Megatron-LM, arXiv 2104.04473",
        about="as many layers in each stage as in any other",
    ),
    "balanced": Planner(
        plan=by_cuts(balanced, keeps_caps=False),
        granularity="op",
        source="plain",
        about="equal compute time, memory not looked at",
    ),
}


def planner(name: str) -> Planner:
    """A planner by name; `_` for `-` is fine. Raises: PlanError if there is none."""
    key = name.lower().replace("_", "-")
    if key not in PLANNERS:
        near = get_close_matches(key, PLANNERS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise PlanError(
            f"no planner is named {name!r}", hint=f"{meant}the planners are {', '.join(PLANNERS)}"
        )
    return PLANNERS[key]


def finder_of(name: str) -> Finder:
    plan = planner(name).plan
    assert isinstance(plan, OneSchedule), f"{name} asks several planners, or tries several schedules"
    return plan.finder


def searches(name: str) -> bool:
    """Whether a planner goes through many schedules, until it is stopped if need be."""
    return isinstance(planner(name).plan, JointPlanner)


def chooses(options: PlanOptions) -> bool:
    """Whether the planner chooses the schedule."""
    return searches(options.planner) and options.schedule is None


def first_way(options: PlanOptions, by: str = FREEING[0]) -> PlanOptions:
    """With a planner of one schedule, `by`, where many are tried, which takes less time; of others the same.

    >>> ways = (first_way(PlanOptions(planner=name, schedule="gpipe")) for name in ("auto", "exact"))
    >>> [way.planner for way in ways]
    ['dawnpiper', 'exact']
    """
    return options.changed(planner=by) if searches(options.planner) else options


def ways_of(options: PlanOptions) -> list[PlanOptions]:
    """The same, and where stages may run side by side also as a chain and by planners of chains."""
    plan = planner(options.planner).plan
    of_dags = isinstance(plan, OneSchedule) and plan.finder.of_dags
    if not of_dags or not options.branches or not options.fastest:
        return [options]
    chains = (options.changed(planner=name) for name in finder_of(options.planner).beside)
    return [options, options.changed(branches=False), *chains]
