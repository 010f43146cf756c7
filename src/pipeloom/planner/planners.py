"""Planners by name, and `make_plan`: OpGraph x Profile x Cluster -> Plan.

Two ways to make a plan:

    OwnSearch     one search, repeated until a candidate keeps its caps (own_search.py)
    JointPlanner  the joint search (joint/search.py), which begins with what other planners' searches find
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any

from ..ir.cluster import Cluster
from ..ir.errors import PlanError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..ir.weight_policies import FLUSH, WEIGHT_POLICIES
from ..schedules.registry import with_chunks
from .branch_gain import faster_of
from .candidate import Candidate
from .joint.axes import AXES
from .joint.search import LEVEL, TINY, JointSearch, Point
from .joint.search_record import NOT_ASKED, SearchRecord
from .own_search import (
    LOWERED,
    OwnSearch,
    SearchLog,
    by_cuts,
    by_order,
    fewer_at_once,
    fewer_at_once_if_need_be,
    level_candidates,
    refusal,
)
from .pipeoffload_schedules import pipeoffload_schedules
from .refusals import fits, refuse_nonsense, scale_caps
from .request import Planner, PlanOptions, Request, SearchWatch
from .search.cut_search import Search
from .search.layer_groups import whole_modules
from .search.problem import Cuts
from .stage_cost.tensors import Readers
from .strategies.dawnpiper import dawnpiper
from .strategies.exact import balanced, equal, exact
from .strategies.graph_chains import (
    pipedream_graph_layers,
    pipedream_graph_ops,
    piper_layers,
    piper_ops,
)
from .strategies.graphpipe import shallow_cuts
from .strategies.pipedream import pipedream, pipedream_repo, vpipe
from .strategies.probe import filled, probe

FREEING = ("probe", "vpipe", "pipedream", "dawnpiper-alone")
"""Planners whose searches are made, where a schedule offloads, until one of them finds a plan."""

QUICK = ("balanced", "equal")
"""Planners that take no time whatever they are asked."""

SEEDS_OF_LARGE = ("exact", "graphpipe", *QUICK)
"""Planners that are asked about graphs of many ops, unless others are named."""

ROOMY = 8
"""Caps of so many times what a plan of a tiny model needs leave nothing to be freed."""

FEW_OPS = 32
"""Ops up to which planners of whole graphs are asked."""

MANY_STAGES = 100
"""Stages from which on only quick planners are asked, unless others are named."""


@dataclass(frozen=True)
class JointPlanner:
    """The joint search.

    schedules: those that are tried where none is named; None for all of the library.
    axes: by name, of `AXES`; () for all.  planners: whose cuts it begins with; () for all.
    orders: whether orders are tried that are no schedule of the library.
    one: plans for one schedule, the usual one if none is named.
    branched: begins with stages that form a DAG, and says what the best chain takes.
    widths: whether there may be several pipelines side by side.
    """

    schedules: Callable[[Request], tuple[str, ...]] | None = None
    axes: tuple[str, ...] = ()
    planners: tuple[str, ...] = ()
    orders: bool = True
    one: bool = False
    branched: bool = False
    widths: bool = False

    def __call__(self, request: Request, *, explained: bool) -> Plan:
        """Raises: as `make_plan`."""
        options = request.options
        if self.one:
            request = replace(
                request, options=replace(options, schedule=options.named_schedule, schedules=())
            )
        elif self.schedules is not None and options.schedule is None and not options.schedules:
            request = replace(request, options=replace(options, schedules=self.schedules(request)))
        schedule = (request.options.schedules or (options.named_schedule,))[0]
        refuse_nonsense(request.graph, request.cluster, options.ranks, schedule)
        return fewer_at_once_if_need_be(self._plan, request, explained=explained)

    def _plan(self, request: Request, *, explained: bool) -> Plan:
        search, options = self._search(request, explained=explained), request.options
        if not (self.branched and request.branched and options.fastest):
            return search.run()
        in_a_row = replace(request, options=replace(options, branches=False))
        return faster_of(search, self._search(in_a_row, explained=False))

    def _search(self, request: Request, *, explained: bool) -> JointSearch:
        axes = {name: AXES[name] for name in self.axes or AXES}
        return JointSearch(request, axes, self.seeds, self.room, orders=self.orders, explained=explained)

    def seeds(self, request: Request, record: SearchRecord) -> Iterator[tuple[str, Point]]:
        """What the searches of planners find, for one stage on each rank. For several cuts whose ranks take
        equally long; and of few places `exact`."""
        if not request.layout.in_line:
            with suppress(PlanError, ScheduleError):
                search = request.search()
                tiny = len(search.places) - 1 <= TINY
                found = _exact_candidates(request) if tiny else level_candidates(request, search)
                by = "exact" if tiny else LEVEL
                yield from ((by, Point(one.request, one.search, one.cuts)) for one in found)
            return
        for name in self.planners or PLANNERS:
            plan, search = planner(name).plan, search_of(request, name)
            own = plan if isinstance(plan, OwnSearch) else None
            if isinstance(plan, JointPlanner) and not plan.branched:
                continue
            many = own is not None and own.arranges and len(search.model) > FEW_OPS
            many |= request.layout.stages > MANY_STAGES and name not in (self.planners or QUICK)
            many |= search.large and name not in (self.planners or SEEDS_OF_LARGE)
            try:
                if many:
                    record.note(record.planners, name, f"{NOT_ASKED} about {len(search.model)} ops")
                elif own is not None:
                    few = search.large and name == "exact"
                    search, cuts = (search, search.fastest_of_few()) if few else own.cut(request, search)
                    if cuts:
                        yield name, Point(request, search, cuts)
                    else:
                        record.note(record.planners, name, "no cut fits")
                else:
                    yield from ((name, point) for point in _branched_seeds(request))
            except PlanError as error:
                record.note(record.planners, name, error.message)

    def room(self, request: Request, record: SearchRecord, *, explained: bool) -> Iterator[tuple[str, Point]]:
        """Cuts that keep the caps, of the first way to find any: of ranks that take equally long, by filling
        stage after stage, of the planners that it begins with, or side by side. Raises: as `make_plan`."""
        asked, request = request, replace(request, options=replace(request.options, fastest=False))
        search, log, kept = request.search(), SearchLog(), list[Candidate]()
        ways: list[tuple[OwnSearch, Search]] = []
        if not request.copies and fits(search):
            kept = [] if request.layout.in_line else level_candidates(request, search)
            ways.append((by_cuts(_fill), search))
        for name in FREEING if request.copies else self.planners:
            if isinstance(plan := planner(name).plan, OwnSearch):
                ways.append((plan, search_of(request, name)))
        for own, of_planner in ways:  # the first of them says why there is none
            kept = kept or own.candidates(request, of_planner, log if log.search is None else SearchLog())
        if self.branched or not self.planners:
            kept = kept or list(islice(_branched_that_fit(request), 1))
        if not kept:
            raise refusal(request, search, log, explained=explained)
        yield "filled", Point(asked, kept[0].search, kept[0].cuts)


def _fill(search: Search) -> Cuts:
    return search.problem.positions(filled(search.problem))


def offloading_schedules(request: Request) -> tuple[str, ...]:
    """Those that PipeOffload leaves to its user, see pipeoffload_schedules.py."""
    ranks, places = len(request.cluster.devices), len(Readers(request.graph).cut_points) - 1
    return pipeoffload_schedules(ranks, places, copies=request.may_offload, chunks=request.options.chunks)


def search_of(request: Request, name: str) -> Search:
    """The search of a planner as one of several."""
    search, by = request.search(), planner(name)
    treatments = search.treatments if by.optimises == "always" else ()
    return replace(search, treatments=treatments, layers=request.layers if by.granularity == "layer" else {})


def _exact_candidates(request: Request) -> list[Candidate]:
    """Where there are none, those with fewer micro-batches on the device at once.

    Raises: PlanError, ScheduleError.
    """
    by = by_cuts(exact, even=True)
    found = by.find(request, request.search(), SearchLog(), roomy=ROOMY)
    if not found and (fewer := fewer_at_once(request)) is not None:
        found = by.find(fewer, fewer.search(), SearchLog())
    return found


def _branched_seeds(request: Request) -> Iterator[Point]:
    for order in request.orders_to_try[:2] if request.branched else ():
        search = replace(request.search(order), by_depth=True, treatments=())
        yield from (Point(request, search, cuts) for cuts in islice(shallow_cuts(search), 2))


def _branched_that_fit(request: Request) -> Iterator[Candidate]:
    """Stages of a DAG that keep their caps; residuals are freed only where that does not go without."""
    orders = request.branch_orders(request.layout.stages) if request.branched else []
    for treatments in dict.fromkeys(((), request.treatments)):
        for share in (1.0, *LOWERED):
            for order in orders:
                search = replace(request.search(order), by_depth=True, treatments=treatments)
                found = (Candidate(request, search, cuts) for cuts in shallow_cuts(scale_caps(search, share)))
                yield from (one for one in found if one.fits and one.keeps_caps)


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


PLANNERS: dict[str, Planner] = {
    "auto": Planner(
        plan=JointPlanner(widths=True),
        granularity="op",
        optimises="always",
        source="this project",
        about="one search over cuts, schedules, device orders and what is freed, from what all others find",
    ),
    "exact": Planner(
        plan=by_cuts(exact, even=True),
        granularity="op",
        optimises="asked",
        source="dynamic programming",
        about="of all cuts that whose slowest stage is fastest; slow where residuals are optimised",
    ),
    "dawnpiper": Planner(
        plan=JointPlanner(
            axes=("cuts",),
            planners=("dawnpiper-alone", "probe", "vpipe", "pipedream"),
            orders=False,
            one=True,
        ),
        granularity="op",
        optimises="always",
        source="arXiv 2505.05856, reconstructed from the abstract; and more",
        about="begins with dawnpiper-alone, probe, vpipe, pipedream; cuts are moved by the simulated step",
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
        plan=by_cuts(dawnpiper, even=True),
        granularity="op",
        optimises="always",
        source="arXiv 2505.05856, reconstructed from the abstract",
        about="halves the stages and bisects between balanced compute and balanced memory",
    ),
    "probe": Planner(
        plan=by_cuts(probe, even=True),
        granularity="op",
        optimises="always",
        source="Pinar and Aykanat 2004, JPDC 64(8)",
        about="parametric search; exact where transfers cost nothing",
    ),
    "graphpipe": Planner(
        plan=JointPlanner(
            axes=("cuts", "branches"),
            planners=("graphpipe", "exact", "probe"),
            orders=False,
            one=True,
            branched=True,
        ),
        granularity="op",
        optimises="always",
        source="arXiv 2406.17145, reconstructed: stages as a DAG",
        about="towers side by side: the least bottleneck, then the shallowest pipeline; cuts are moved",
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
        plan=by_order(pipedream_graph_layers, keeps_caps=False),
        granularity="layer",
        source="msr-fiddle/pipedream, over antichains",
        about="balances compute and transfers by layers of the whole graph, for a chain of stages",
    ),
    "pipedream-graph-ops": Planner(
        plan=by_order(pipedream_graph_ops, keeps_caps=False),
        granularity="op",
        source="msr-fiddle/pipedream, over antichains",
        about="the same by ops, for small graphs",
    ),
    "piper": Planner(
        plan=by_order(piper_layers),
        granularity="layer",
        source="NeurIPS 2021, over pairs of down-sets",
        about="the least compute and transfers under the caps by layers of the whole graph, for a chain",
    ),
    "piper-ops": Planner(
        plan=by_order(piper_ops),
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


def searches(name: str) -> bool:
    """Whether a planner goes through many schedules, until it is stopped if need be."""
    plan = planner(name).plan
    return isinstance(plan, JointPlanner) and not plan.one


def chooses(options: PlanOptions) -> bool:
    """Whether the planner chooses the schedule."""
    return searches(options.planner) and options.schedule is None


def chooses_width(options: PlanOptions) -> bool:
    """Whether the planner looks for the fastest number of pipelines side by side. Other engines, for which
    whole modules are planned, set that up themselves; several stages on a rank, or late gradients, ask for a
    pipeline."""
    plan, several = planner(options.planner).plan, options.ranks > 1 and options.chunks in (None, 1)
    flushes = WEIGHT_POLICIES[options.weights or FLUSH].flushes and not options.shard_optimizer
    chosen = options.any_width and options.fastest and options.granularity == "op" and chooses(options)
    return isinstance(plan, JointPlanner) and plan.widths and chosen and several and flushes


def first_way(options: PlanOptions, by: str = "dawnpiper") -> PlanOptions:
    """With a planner of one schedule, `by`, where many are tried, which takes less time; of others the same.
    With several stages on each rank, where so many are asked for.

    >>> ways = (first_way(PlanOptions(planner=name, schedule="gpipe")) for name in ("auto", "exact"))
    >>> [way.planner for way in ways]
    ['dawnpiper', 'exact']
    >>> first_way(PlanOptions(planner="auto", chunks=3)).schedule
    'interleaved_1f1b:v=3'
    """
    if not searches(options.planner):
        return options
    if options.schedule is None and (options.chunks or 1) > 1:
        several = with_chunks("interleaved_1f1b", options.chunks)
        return options.changed(planner=by, schedule=several, chunks=None)
    return options.changed(planner=by)


def ways_of(options: PlanOptions) -> list[PlanOptions]:
    """The same, and where stages may run side by side also as a chain and by planners of chains."""
    plan = planner(options.planner).plan
    of_dags = isinstance(plan, JointPlanner) and plan.branched
    if not of_dags or not options.branches or not options.fastest:
        return [options]
    chains = (options.changed(planner=name) for name in ("exact", "probe"))
    return [options, options.changed(branches=False), *chains]
