"""make_plan: OpGraph x Profile x Cluster -> Plan, by any planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from ..ir.cluster import Cluster
from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.memory_policy import LEAST_AT_ONCE, Treatment
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..ir.text import format_bytes
from .ask_planners import FOUND_BY, fastest_of_planners
from .branches import BranchOrdered
from .candidate import Candidate
from .choose_schedule import (
    FIRST,
    POLISHES,
    ROUNDS as TRIED_ROUNDS,
    Try,
    choose_schedule,
    schedule_names,
)
from .plan_costs import PlanCosts
from .refine import (
    HUGE,
    FailedSearches,
    faster_of,
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
    passes_caps,
    refuse_nonsense,
    scale_caps,
    stage_needs,
    too_many_stages,
)
from .registry import Planner, planner
from .request import PlanOptions, Request, SearchWatch, profile_of
from .search.cut_search import Search
from .search.even_ranks import even_ranks
from .stage_cost.tensors import Readers

ONE_STAGE_EACH = "1f1b"
"""The schedule with one stage on each rank, and what the notes on it begin with."""

STEP_BESIDE = f"{ONE_STAGE_EACH}.step_s"
"""Note: seconds of its step."""

CLEARLY = 0.03
"""Share by which a plan is faster than a quick cut for 1F1B where its planner is not asked for one."""


def beside_1f1b(request: Request, plan: Plan, find: Callable[[Request], Candidate | None]) -> Plan:
    """The plan; if it is slower than the first that its planner finds for 1F1B under the same caps, with
    notes on that: seconds of its step, bytes of the rank that holds most, and the op that takes longest.

    find: that candidate of a request; None if none keeps its caps.
    """
    branches = request.options.branches and request.planner.arrange is None
    other = replace(request, options=replace(request.options, schedule=ONE_STAGE_EACH, branches=branches))
    try:
        other.refuse_what_cannot_be()
        search = other.search()
        quick = even_ranks(search, other.layout.placement, other.microbatches)
        least_s = (1 - CLEARLY) * fit_caps(other, search, quick).timeline.step_s if quick else 0.0
        found = find(other) if plan.predicted_step_s > least_s else None
    except (PlanError, ScheduleError):  # 1F1B cannot be planned, so there is nothing to compare with
        return plan
    if found is None or found.timeline.step_s >= plan.predicted_step_s:
        return plan
    profile = profile_of(request.profile, request.cluster.devices[0].name, request.graph)
    seconds = {
        op.name: profile.costs[op.name].forward_s + profile.costs[op.name].backward_s
        for op in request.graph.ops
    }
    longest = max(seconds, key=seconds.__getitem__)
    notes = {
        "step_s": repr(found.timeline.step_s),
        "peak_bytes": str(max(map(found.timeline.peak_bytes, range(found.timeline.ranks)))),
        "op": longest,
        "op_s": repr(seconds[longest]),
    }
    told = {f"{ONE_STAGE_EACH}.{key}": text for key, text in notes.items()}
    return replace(plan, notes={**plan.notes, **told})


def slower_than_1f1b(plan: Plan) -> list[str]:
    """The sentence on these notes; none for a plan that has none, or is faster after all."""
    begin = f"{ONE_STAGE_EACH}."
    told = {key.removeprefix(begin): text for key, text in plan.notes.items() if key.startswith(begin)}
    other_s = float(plan.notes.get(STEP_BESIDE, "inf"))
    if other_s >= plan.predicted_step_s:
        return []
    turns = [part.forward_s + part.input_grad_s + part.weight_grad_s for part in plan.stages]
    ranks = max(plan.placement) + 1
    share_s, op_s = sum(turns) / ranks, float(told["op_s"])
    if op_s > share_s * plan.replicas:
        stage = next(k for k, part in enumerate(plan.stages) if told["op"] in part.ops)
        why = (
            f"op {told['op']} takes {op_s * 1e3:.4g} ms of {sum(turns) * 1e3:.4g} ms per micro-batch, more "
            f"than a rank's share of {share_s * 1e3:.4g} ms: it fills rank {plan.placement[stage]}, and more "
            "stages on each rank do not change that"
        )
    else:
        busy = [0.0] * ranks
        for index, rank in enumerate(plan.placement):
            busy[rank] += plan.microbatches / plan.replicas * turns[index % len(turns)]
        why = f"its busiest rank computes for {max(busy) * 1e3:.4g} ms of its step, and waits for the rest"
    slower = plan.predicted_step_s / other_s - 1
    return [
        f"slower by {slower:.1%} than {ONE_STAGE_EACH}, with which a step takes {other_s * 1e3:.4g} ms and "
        f"no rank holds more than {format_bytes(int(told['peak_bytes']))}: {why}"
    ]


ROUNDS = 5
"""Searches until the schedule and the simulated peaks of the found cut agree with what was searched with; of
large graphs all that are made."""

ROUNDS_TOGETHER = 16
"""All searches where ranks have several stages, each of which takes longer."""

LOWERED = (0.95, 0.9, 0.8, 0.7)
"""Shares of all caps that are searched with where that does not come to an end."""


HOPELESS = 0.15
"""Share of all caps by which the first two candidates pass these, where few rounds are made at all."""

ROOMY = 1 << 60
"""Bytes of a device where memory is not to matter."""


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
    explained: if nothing fits, look for how far it is from fitting, which takes longer; and see whether 1F1B
        would be faster than several stages on a rank.
    watch: told how the search goes on.
    Raises: PlanError if the request makes no sense; InfeasibleError if nothing fits under the devices'
        memory.
    """
    options = options.changed(**changes)
    asked = planner(options.planner)

    def request(by: Planner) -> Request:
        devices = replace(cluster, devices=cluster.devices[: options.ranks])
        return Request(graph, profile, devices, options, by, watch)

    if asked.asks:
        plan_by = partial(make_plan, graph, profile, cluster, options, watch=watch)
        costs = PlanCosts(graph, profile, cluster)
        asks = options.planners or asked.asks
        plan = fastest_of_planners(
            plan_by, asks, options.planner, costs, fastest=options.fastest, explained=explained
        )
        asked = planner(plan.notes[FOUND_BY])
    else:
        schedule = FIRST[0] if asked.chooses_schedule else options.schedule
        refuse_nonsense(graph, cluster, options.ranks, schedule)
        if asked.chooses_schedule:
            return replace(_of_many_schedules(request(asked), explained=explained), planner=options.planner)
        plan = _plan_or_with_fewer(request(asked), explained=explained)
    if not explained or not options.fastest or options.replicas > 1 or asked.chooses_schedule:
        return plan
    own = request(asked)
    return plan if own.layout.in_line else beside_1f1b(own, plan, _first_own)


def first_way(name: str, schedule: str) -> tuple[str, str]:
    """The planner and the schedule with which a planner of many schedules, or one that asks others, tries
    first, whose plans are among its own, and which takes less time; of other planners these.

    >>> first_way("pipeoffload", "gpipe"), first_way("auto", "gpipe"), first_way("exact", "gpipe")
    (('dawnpiper', '1f1b'), ('dawnpiper', 'gpipe'), ('exact', 'gpipe'))
    """
    if asks := planner(name).asks:
        return asks[0], schedule
    return (POLISHES, FIRST[0]) if planner(name).chooses_schedule else (name, schedule)


def _of_many_schedules(request: Request, *, explained: bool) -> Plan:
    """The fastest plan of all schedules that are worth a try; see `choose_schedule`."""
    cluster, options = request.cluster, request.options
    roomy = replace(cluster, devices=tuple(replace(d, memory_bytes=ROOMY) for d in cluster.devices))

    def plan(one: Try) -> Plan:
        refuse_nonsense(request.graph, cluster, len(cluster.devices), one.schedule)
        by = planner(one.planner)
        if one.planner != POLISHES:
            by = replace(by, polishes=one.polishes, rounds=TRIED_ROUNDS)
        own = replace(
            request,
            cluster=cluster if one.capped else roomy,
            planner=by,
            below_s=one.below_s,
            options=replace(options, schedule=one.schedule, planner=one.planner, treatments=one.treatments),
        )
        return _plan_or_with_fewer(own, explained=False)

    linked = all(device.host_link is not None for device in cluster.devices)
    allowed = options.allowed is None or "offload" in options.allowed
    places = len(Readers(request.graph).cut_points) - 1
    try:
        return choose_schedule(
            plan,
            options.schedules or schedule_names(len(cluster.devices), places, copies=linked and allowed),
            [device.memory_bytes for device in cluster.devices],
            treatments=options.allowed,
            fastest=options.fastest,
            watch=request.watch,
        )
    except InfeasibleError:
        if not explained:
            raise
    first = replace(options, schedule=FIRST[0], planner=POLISHES)
    return _plan_or_with_fewer(replace(request, options=first, planner=planner(POLISHES)), explained=True)


def _plan_or_with_fewer(request: Request, *, explained: bool) -> Plan:
    """The plan that is asked for; where nothing fits, that with fewer micro-batches of a stage that offloads
    on the device at once."""
    if request.planner.arrange is not None:  # its stages are a chain
        request = replace(request, options=replace(request.options, branches=False))
    options = request.options
    request.refuse_what_cannot_be()
    if "offload" not in request.treatments or options.offloaded_at_once == LEAST_AT_ONCE:
        return _plan_of(request, explained=explained)
    try:
        return _plan_of(request, explained=False)
    except InfeasibleError:
        fewer = replace(options, offloaded_at_once=LEAST_AT_ONCE)
        again = replace(request, options=fewer, only_offloading=True)
        return _plan_of(again, explained=explained)


def _plan_of(request: Request, *, explained: bool) -> Plan:
    """The plan that is asked for; raises as `make_plan`."""
    asked, options = request.planner, request.options
    stages, schedule, cluster = len(request.cluster.devices), request.schedule, request.cluster
    count = request.layout.stages
    if count > (places := len(request.models[0].cut_points) - 1):
        why = f"{count} stages, but ops that share an updated buffer stay together, which leaves {places}"
        raise too_many_stages(why, places, schedule, stages, cluster)
    search = request.search()
    log = _SearchLog()
    best = _best_under_caps(request, search, log)
    if asked.propose is not None and options.branches and request.layout.in_line and options.fastest:
        in_a_row = replace(request, options=replace(options, branches=False))
        best = faster_of(best, _best_under_caps(in_a_row, search, log))
    if best is None:
        raise _refusal(request, search, log, explained=explained)
    return best.plan()


def _best_under_caps(request: Request, search: Search, log: _SearchLog) -> Candidate | None:
    """The best candidate under the caps, or, of small graphs, what is found under smaller ones, as that takes
    another search. log: see `_best_candidate`."""
    best = _best_candidate(request, search, log)
    if not request.options.fastest or request.planner.rounds is not None or search.large:
        return best
    return faster_under_less(request, best, lambda less: _best_candidate(less, less.search(), _SearchLog()))


def _best_candidate(request: Request, search: Search, log: _SearchLog) -> Candidate | None:
    """The fastest that the planner and those that it starts from find; the first if that will do. log: of
    the planner that was asked, is filled."""
    asked, options = request.planner, request.options
    branches = options.branches and request.layout.in_line
    candidates = _even_candidates(request, search) if asked.evens and not request.layout.in_line else []
    if candidates and not options.fastest:
        return candidates[0]
    request = _below(request, candidates)
    planners = (asked, *map(planner, asked.also))
    if asked.propose is not None and len(search.model) > HUGE:
        found = fastest_of_few(request, search, asked.propose)
        if found is not None:
            return found  # if not, caps are tight: then it takes long
    for each in planners if options.fastest else reversed(planners):
        if each.propose is not None and branches:
            candidates += shallow_candidates(request, each.propose, LOWERED)
        elif each.propose is None and each is asked:
            candidates += _first_that_fits(request, search, each, log)
        elif each.propose is None:
            other = log if asked.propose is not None else _SearchLog()
            candidates += _first_that_fits(request, _search_of(search, request, each), each, other)
        if candidates and not options.fastest:
            break
    if not candidates:
        return None
    if not (asked.polishes and options.fastest):
        return min(candidates, key=lambda found: found.timeline.step_s)
    if asked.propose is not None and branches:
        return polish_some([*candidates, *with_slack(candidates)])
    return polish_cuts(candidates, search)


def _even_candidates(request: Request, search: Search) -> list[Candidate]:
    """Of cuts whose ranks take equally long, from several starts, those that keep their caps."""
    layout, found = request.layout, list[Candidate]()
    others = layout.stages - layout.ranks  # than one stage on each rank
    all_alike, last_on_ranks, first_on_ranks = 0, others, -others  # which stages share out what is not bare
    for bare in dict.fromkeys((all_alike, last_on_ranks, first_on_ranks)):
        find = partial(even_ranks, placement=layout.placement, microbatches=request.microbatches, bare=bare)
        by = replace(request.planner, find=find, keeps_caps=True, arrange=None)
        found += _first_that_fits(request, search, by, _SearchLog())
        request = _below(request, found)
    return sorted(found, key=lambda candidate: candidate.timeline.step_s)


def _below(request: Request, found: Sequence[Candidate]) -> Request:
    """The request for what may be faster than what was found."""
    below_s = min([request.below_s, *(candidate.timeline.step_s for candidate in found)])
    return request if below_s == request.below_s else replace(request, below_s=below_s)


@dataclass
class _SearchLog:
    """What a planner came across: its first cuts, () if it found none, and the search whose op order they are
    of; and all candidates simulated since."""

    first_cuts: tuple[int, ...] = ()
    search: Search | None = None
    candidates: list[Candidate] = field(default_factory=list)


def _search_of(search: Search, request: Request, other: Planner) -> Search:
    """The search of another planner for the same."""
    return replace(
        search,
        treatments=search.treatments if other.optimises == "always" else (),
        layers=request.layers if other.granularity == "layer" else {},
    )


def _first_that_fits(request: Request, search: Search, by: Planner, log: _SearchLog) -> list[Candidate]:
    """The first candidate of a planner that keeps its caps in its simulated step, if any; of a schedule that
    fits the caps those for all that a stage may be taken to hold, the fastest first. log: is filled."""
    found = _first_of(request, search, by, log)
    if request.fits_caps and not any(candidate.copies_nothing for candidate in found):
        for other in more_held(request, search):
            found += _first_of(request, other, by, _SearchLog())
    return sorted(found, key=lambda candidate: candidate.timeline.step_s)


def _first_own(request: Request) -> Candidate | None:
    """The first candidate of the planner's own search."""
    return next(iter(_first_of(request, request.search(), request.planner, _SearchLog())), None)


def _first_of(request: Request, search: Search, by: Planner, log: _SearchLog) -> list[Candidate]:
    """The first candidate of one search, if any. log: is filled."""
    if by.arrange is None:
        log.first_cuts = by.find(search)
    elif (arranged := by.arrange(search)) is not None:
        search = request.search(BranchOrdered(arranged.ops, (0,)))
        log.first_cuts = arranged.cuts
    log.search = search
    if not log.first_cuts or (not by.keeps_caps and _exceeds_caps(search, log.first_cuts)):
        return []
    rounds = (
        1 if by.arrange else ROUNDS if search.large else None if request.layout.in_line else ROUNDS_TOGETHER
    )
    if by.rounds is not None:
        rounds = by.rounds if rounds is None else min(rounds, by.rounds)
    for candidate in islice(_candidates(fit_caps(request, search, log.first_cuts), by), rounds):
        log.candidates.append(candidate)
        if candidate.tighter() is None and candidate.host_shortage is None:
            return [candidate]
        if by.rounds is not None and _is_hopeless(log.candidates, request):
            break
    return []


def _is_hopeless(tried: Sequence[Candidate], request: Request) -> bool:
    """Whether all of several candidates pass the caps by so much that others are not worth their search."""
    least = min(sum(candidate.over) for candidate in tried)
    return len(tried) > 1 and least > HOPELESS * sum(d.memory_bytes for d in request.cluster.devices)


def _refusal(request: Request, search: Search, log: _SearchLog, *, explained: bool) -> InfeasibleError:
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
    if request.planner.arrange is not None:
        return finds_no_chain(search, request.options.planner)
    if explained:
        return explain_infeasible(search, request.wider)
    return InfeasibleError(f"no cut into {len(search.caps)} stages fits")


def _candidates(first: Candidate, by: Planner) -> Iterator[Candidate]:
    """Cuts to simulate until one keeps its caps there, as the model of a stage has estimated: first with the
    caps of the ranks that passed theirs lowered by that; then with all caps lowered alike, as far as a cut is
    found; then with fewer ways to free memory, whose estimates are simpler."""
    request, search = first.request, first.search
    failed = FailedSearches()

    def found(search: Search) -> Candidate | None:
        if failed.covers(search):
            return None
        candidate = _candidate(request, search, by)
        if candidate is None:
            failed.searches.append(search)
        return candidate

    yield first
    for treatments in _fewer_treatments(search.treatments):
        if request.only_offloading and "offload" not in treatments:
            break
        in_flight = tuple(map(max, first.in_flight, search.in_flight))
        relaxed = replace(search, treatments=treatments, in_flight=in_flight)
        following = _tighter_search(first) if treatments == search.treatments else relaxed
        last = relaxed
        slow = first.timeline.step_s > request.below_s
        for _ in range(ROUNDS):
            if slow or (candidate := found(following)) is None:
                break
            yield candidate
            slow = candidate.timeline.step_s > request.below_s
            last = following = _tighter_search(candidate)
        for lower in _lowered(first, relaxed, last):
            if not slow and (candidate := found(lower)):
                yield candidate
                slow = candidate.timeline.step_s > request.below_s


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


def _candidate(request: Request, search: Search, by: Planner) -> Candidate | None:
    """What a planner finds, simulated; None if it finds no cut, or one that does not fit."""
    cuts = by.find(search)
    if not cuts or (not by.keeps_caps and _exceeds_caps(search, cuts)):
        return None
    return fit_caps(request, search, cuts)


def _fewer_treatments(treatments: tuple[Treatment, ...]) -> list[tuple[Treatment, ...]]:
    """All of them, without offloading, and none."""
    without = tuple(t for t in treatments if t != "offload")
    return list(dict.fromkeys((treatments, without, ())))


def _exceeds_caps(search: Search, cuts: tuple[int, ...]) -> bool:
    """Whether a stage of a cut holds more than its cap."""
    return any(need > cap for need, cap in zip(stage_needs(search, cuts), search.caps, strict=True))
