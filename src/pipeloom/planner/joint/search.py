"""One search over cuts, orders of ops, schedules, orders of devices and what is freed.

    Seeds: what every planner finds for one stage on each rank, and cuts whose ranks take equally long for
    every other place that a schedule puts stages in. Then moves of one axis each (axes.py) of the best few,
    round after round, until a round brings less than `LITTLE`, or time is up.

Three tiers judge what is tried. Most dies at the first two:

    1. a bound: the busiest rank computes its stages for all micro-batches
    2. a step in the order of something known, of a few micro-batches and stretched (estimates.py)
    3. the simulated step under the caps, by which plans are compared

The objective is that step. What passes a cap counts by how much it does, so that moves may mend it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from operator import add
from typing import NamedTuple, TypeAlias

import numpy as np

from ...ir.cluster import Cluster
from ...ir.errors import ConfigError, InfeasibleError, PlanError, ScheduleError, shown
from ...ir.flow import flow_of
from ...ir.plan import Plan
from ...ir.stages import chain, replicate
from ...ir.weight_policies import FLUSH, WEIGHT_POLICIES
from ...schedules import registry
from ...schedules.language.names import CHUNKS as OF_CHUNKS
from ..candidate import Candidate
from ..fit_caps import fit_caps
from ..pipeoffload_schedules import CHUNKS, pipeoffload_schedules
from ..placement import Layout, message_seconds
from ..plan_costs import PlanCosts
from ..refusals import TooManyStages, fits, state_passes_caps, too_many_stages
from ..request import Request
from ..search.cut_search import Search
from ..search.problem import Cuts
from ..searched_order import with_searched_order
from ..stage_cost.tensors import Readers
from .bound import bound_s
from .estimates import ACTIONS, ClosedForm, CutTimes, Estimate, InOrder, climb, level_starts
from .search_record import INTERRUPTED, SAME, SPENT, TIME_LIMIT, SearchRecord

LITTLE = 1e-3
"""Share of the step that a round has to save for another one."""

ROUNDS = 12

LINES, CLOSE = 4, 0.08
"""Ways whose best candidates are moved, at most, and by which share of the step they may be slower."""

TINY = 16
"""Places for cuts up to which a cut moved by one is another model: then the best of each layout is moved, and
`exact` is asked about several stages per rank, too."""

FEW, EACH, FAR = 6, 2, 0.03
"""Schedules that are simulated in any case, those of each layout, as estimates by an order for equal times
are coarse, and by which share of the best step the estimates of others may be longer."""

FITS = 4
"""Searches for treatments with which the same cut keeps its caps."""

BUDGET, ORDERING, LEAST, WEIGHING = 8_000_000, 10, 3_000, 100
"""Actions that are simulated in one search, how many one counts for where it is ordered by time, how many a
candidate counts for at least, and how many each op counts for."""

MOST_ESTIMATED = 200_000
"""Actions of an order that estimates of single cuts go through."""

SHORT, LONG = 3, 5
"""Micro-batches per rank of a short step, and those up to which a step is short enough."""

ORDERS, EFFORT, SMALL = 3, 0.3, 200
"""Plans whose stages are put into a faster order, and the effort of that search; places for cuts, or these
times ranks, beyond which a model is large: then the search of the best plan's order builds the library within
its limits, which takes seconds."""

MENDED = 0.25
"""Share of all caps by which a cut of a model that is not large may pass them and still be moved."""

CLOSEST, WORTH = 0.005, 0.02
"""Gap to the bound up to which nothing is moved; gap up to which no faster order is looked for, and share of
the step by which a plan of a model of many places may be slower and still have its order searched."""

PROPOSED = 3
"""Cuts of one order of branches."""

LEVEL = "level cuts"
"""What seeds are called that no planner has found."""

PROMISING = ("1f1b", "zb_v", "zb_h2", "zb_h1", "gis", "interleaved_1f1b", "dualpipe", "chimera", "hanayo")
"""Schedules that are tried first, which matters where the budget ends before all were."""

HOLD_LITTLE = ("v_min", "gis_h")
"""Schedules that hold little, which are tried where nothing keeps the caps."""

LEFT_OUT = ("forward_only", "zb_1p", "zb_2p", "gis_g")
"""Schedules that do not train, or are others unless options are set."""


@dataclass(frozen=True)
class Point:
    """What may become a candidate.

    request: with its schedule, and the devices in the order of ranks.  search: the order of ops, and what may
    be freed.  order: of each rank the number of its device; () for that of the cluster.
    """

    request: Request
    search: Search
    cuts: Cuts
    order: tuple[int, ...] = ()

    @cached_property
    def key(self) -> tuple[object, ...]:
        search, options = self.search, self.request.options
        how = search.treatments, search.caps, bool(search.layers), search.by_depth
        held = self.request.slack, options.branches, options.offloaded_at_once
        return (*self.way, *held, search.model.readers.order, *how, self.cuts)

    @property
    def way(self) -> tuple[str, tuple[int, ...]]:
        return self.request.schedule, self.order


class Judged(NamedTuple):
    """key: bytes over the caps, and seconds of the step."""

    point: Point
    found: Candidate
    key: tuple[int, float]

    @property
    def fits(self) -> bool:
        return self.key[0] == 0

    @property
    def step_s(self) -> float:
        return self.key[1]


Seeds: TypeAlias = Callable[[Request, SearchRecord], Iterator[tuple[str, Point]]]
"""What planners find, by their names."""

Axis: TypeAlias = "Callable[[JointSearch, Judged], Iterator[Point]]"
"""A candidate -> what it becomes by moves of one kind, the most promising first. Told between two of them
what became of the one before: `JointSearch.best_of` has it."""


class TimeIsUp(Exception):
    """The limit is reached, and there is a plan."""


class JointSearch:
    """axes: by name, in the order in which they are tried.  seeds: what planners find."""

    def __init__(
        self,
        request: Request,
        axes: Mapping[str, Axis],
        seeds: Seeds,
        room: Callable[..., Iterator[tuple[str, Point]]],
        *,
        orders: bool = True,
        explained: bool = True,
    ) -> None:
        """room: seeds that keep the caps, asked for if nothing else does.  orders: of the best plans the
        schedule search looks for a faster order.  explained: see `make_plan`."""
        self.request, self.axes, self.seeds, self.room, self.orders = request, axes, seeds, room, orders
        self.explained = explained
        self.hopeless = state_passes_caps(request.graph, request.cluster, request.options.sharing)
        self.record = SearchRecord()
        self.until = time.monotonic() + (request.options.time_limit or inf)
        self.ways: dict[tuple[str, tuple[int, ...]], Request] = {}
        self.best_of: dict[tuple[str, tuple[int, ...]], Judged] = {}
        self.tried: dict[object, Judged | None] = {}
        self.level: dict[Layout, list[Cuts]] = {}
        """Cuts whose ranks take equally long, by where stages are."""
        self.best: Judged | None = None
        self.closest: Judged | None = None
        self.ordered: list[Plan] = []
        """Plans whose stages run in a faster order."""
        self.spent = 0
        self.refused: InfeasibleError | None = None
        self.errors: list[PlanError | ScheduleError] = []
        self.pressed = False
        """Whether caps have cost anything: something was freed, or passed them."""
        self.places = len(Readers(request.graph).cut_points) - 1
        self.tiny = self.places <= TINY
        self.record.bound_s = bound_s(self.request, self.names)

    # --- what there is to choose from -----------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Schedules without copies, by name; those that were named, if any were.

        Raises: TooManyStages, ConfigError if none has as many stages per rank as are asked for.
        """
        options, ranks = self.request.options, len(self.request.cluster.devices)
        if options.schedules or options.schedule:
            return options.schedules or (options.named_schedule,)
        if ranks == 1 and options.chunks in (None, 1):
            return (options.named_schedule,)
        found = []
        flushes = WEIGHT_POLICIES[options.weights or FLUSH].flushes
        # Replicas of a stage would each update the buffers of its forward.
        both_ways = flushes and options.replicas == 1 and not self.request.graph.together
        for name in registry.names():
            entry = registry.entry(name)
            usable = entry.weights == FLUSH and not entry.lacks and entry.place != "table"
            if not usable or name in LEFT_OUT or entry.offload is not None:
                continue
            if entry.place in ("loop", "wave"):
                chosen = (options.chunks,) if options.chunks else CHUNKS if entry.place == "loop" else (2,)
                fitting = [v for v in chosen if v * ranks <= self.places and flushes]
                found += [name if v == 2 else f"{name}:{OF_CHUNKS}={v}" for v in fitting]
            elif options.chunks in (None, 1) and (entry.place == "line" or both_ways):
                found.append(name)
        if not found and options.chunks:
            raise self._refuse_chunks(options.chunks)
        early = {name: number for number, name in enumerate(PROMISING)}
        return tuple(sorted(found, key=lambda name: early.get(name, len(early))))

    def _refuse_chunks(self, chunks: int) -> PlanError | ConfigError:
        """The error where no schedule has so many stages on each rank."""
        ranks, places, weights = len(self.request.cluster.devices), self.places, self.request.options.weights
        if WEIGHT_POLICIES[weights or FLUSH].flushes:
            most = places // ranks
            return TooManyStages(
                f"{shown(chunks)} stages per rank are {shown(chunks * ranks)} on {ranks} "
                f"{'ranks' if ranks > 1 else 'rank'}, the model can be cut into {places}",
                hint=f"use at most {most} (--chunks {most})" if most else f"use at most {places} ranks",
                places=places,
            )
        return ConfigError(
            f"each rank is to have {shown(chunks)} stages (chunks); with weights {weights} only schedules "
            "of one are tried",
            hint="leave out --chunks or --weights, or name a schedule: --schedule interleaved_1f1b",
        )

    @property
    def alone(self) -> bool:
        """Whether there is but one schedule to try."""
        return len(self.names) == 1

    @cached_property
    def copying(self) -> tuple[str, ...]:
        """Schedules that offload, by name; none if others were named."""
        options, ranks = self.request.options, len(self.request.cluster.devices)
        if options.schedule or options.schedules or self.request.updates or not self.request.may_offload:
            return ()
        plain, known = (
            pipeoffload_schedules(ranks, self.places, copies=copies, chunks=options.chunks)
            for copies in (False, True)
        )
        return tuple(name for name in known if name not in plain)

    def way(self, name: str, order: tuple[int, ...] = ()) -> Request:
        """The request for a schedule, on devices in some order. Raises: PlanError, ScheduleError."""
        if (name, order) not in self.ways:
            request = self.request
            if order:
                devices = tuple(request.cluster.devices[index] for index in order)
                known = next((r for (_, other), r in self.ways.items() if other == order), None)
                own = request.shared
                shared = known.shared if known else replace(own, models={}, known={}, steps={})
                request = replace(request, cluster=replace(request.cluster, devices=devices), shared=shared)
            request = replace(request, options=replace(request.options, schedule=name, schedules=()))
            request.refuse_what_cannot_be()
            if request.layout.stages > self.places:
                why = f"{request.layout.stages} stages, the model can be cut into {self.places}"
                raise too_many_stages(why, self.places, name, len(request.cluster.devices), request.cluster)
            # Where nothing fits yet, orders that cost several searches are no way to begin.
            most = BUDGET / 2 if self.best is not None else 2 * BUDGET
            if self.closest is not None and self.spent + 2 * self._actions(request) > most:
                self.record.ended = SPENT
                raise PlanError("not tried: other schedules took the time", hint="name it alone")
            if not self.ways or request.entry.recipe is not None:
                self.spent += self._actions(request)
            self.ways[name, order] = request
        return self.ways[name, order]

    def _actions(self, request: Request) -> int:
        """What a candidate counts for in the budget."""
        layout = request.layout
        count = 3 * layout.stages * request.microbatches
        return max(LEAST, count if request.entry.recipe is None or self.alone else ORDERING * count)

    def cut_times(self, request: Request, search: Search, also: Cuts = ()) -> CutTimes:
        weighed = self.pressed and not search.large  # of large graphs as the known candidate is
        if self.alone:  # there is time for every place of a large graph
            also = tuple(search.model.cut_points.tolist())
        return CutTimes(search, request.layout, request.microbatches, weighed=weighed, also=also)

    def estimate(self, request: Request, search: Search) -> Estimate:
        """By a schedule's order for equal times, and of a chain, a short one if there are many micro-batches;
        by the closed form where the order is long."""
        layout, cuts = request.layout, self.cut_times(request, search)
        count = request.microbatches // layout.replicas
        short = count if count <= LONG * layout.ranks else SHORT * layout.ranks
        flushes = request.updates is None
        if not flushes or 3 * layout.stages * layout.replicas * short > MOST_ESTIMATED:
            return ClosedForm(cuts)
        few = request
        if short < count:
            few = replace(request, options=replace(request.options, microbatches=short * layout.replicas))
        flow = flow_of(replicate(chain(layout.stages), layout.replicas))
        return InOrder(cuts, few.usual.columns, flow)

    def estimate_of(self, judged: Judged) -> Estimate:
        """By the order of a candidate."""
        request, found = judged.point.request, judged.found
        cuts = self.cut_times(request, found.search, found.cuts)
        columns = found.schedule.columns
        if request.updates is not None or len(columns) > ACTIONS:
            return ClosedForm(cuts, found)
        placement, cluster = request.layout.placement, request.cluster
        return InOrder(cuts, columns, flow_of(found.stages), messages_of(found, placement, cluster), found)

    # --- judging --------------------------------------------------------------------------------------

    def judge(self, point: Point, by: str) -> Judged | None:
        """The candidate of a point; None if it was known, cannot be, or is no better for sure.

        by: the axis, or the planner.
        """
        if point.key in self.tried:
            return None
        self.tried[point.key] = None
        if self.best is not None and time.monotonic() > self.until:
            raise TimeIsUp
        best_s = self.best.step_s if self.best is not None else inf
        if least_step_s(point.request, point.search, point.cuts) >= best_s * (1 - SAME):
            self.record.died["bound"] += 1
            return None
        cost = self._actions(point.request) + WEIGHING * len(point.request.graph.ops)
        if self.spent + cost > BUDGET and self.best is not None:
            self.record.died["budget"] += 1
            self.record.ended = SPENT
            return None
        self.spent += cost
        self._tell(point, by)
        self.record.tried[by] += 1
        try:
            judged = self._simulated(point)
        except (PlanError, ScheduleError) as error:
            self.errors.append(error)
            self.record.note(self.record.schedules, point.request.schedule, error.message)
            return None
        self.tried[point.key] = judged
        known = self.best_of.get(point.way)
        if known is None or judged.key < known.key:
            self.best_of[point.way] = judged
        if self.closest is None or judged.key < self.closest.key:
            self.closest = judged
        if judged.fits:
            self.record.note(self.record.schedules, point.request.schedule, judged.step_s)
            if judged.step_s < best_s * (1 - SAME):
                if self.best is not None:
                    self.record.gained[by] = self.record.gained.get(by, 0.0) + best_s - judged.step_s
                self.best = judged
        return judged

    def _simulated(self, point: Point) -> Judged:
        """With as much freed as caps ask for; of a small model's DAG, with schedules of chains, too."""
        request, search, cuts = point.request, point.search, point.cuts
        found = fit_caps(request, search, cuts)
        tries = [found]
        if any(found.over) and not search.optimises and request.treatments:
            self.pressed = True
            found = fit_caps(request, replace(search, treatments=request.treatments), cuts)
            tries.append(found)
        for _ in range(FITS):
            if not any(found.over) or not found.search.optimises or (search := found.tighter()) is None:  # type: ignore[assignment]
                break
            found = fit_caps(request, search, cuts)
            tries.append(found)
        best = min(tries, key=key_of)
        if self.tiny and not request.layout.in_line and request.orders_to_try:
            in_a_row = replace(request, options=replace(request.options, branches=False))
            best = min(best, fit_caps(in_a_row, best.search, cuts), key=key_of)
        self.pressed = self.pressed or any(best.over) or any(map(bool, best.policy.stages))
        return Judged(point, best, key_of(best))

    def _tell(self, point: Point, by: str) -> None:
        if self.request.watch is not None:
            best = None if self.best is None else (self.best.point.request.schedule, self.best.step_s)
            self.request.watch.trying(f"{by}: {point.request.schedule}", best, self.record.bound_s)

    # --- the search -----------------------------------------------------------------------------------

    def run(self) -> Plan:
        """The plan of the shortest step that is found.

        Raises: InfeasibleError if none keeps its caps; PlanError or ScheduleError if none can be made.
        """
        try:
            self._search()
        except TimeIsUp:
            self.record.ended = TIME_LIMIT
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.record.ended = INTERRUPTED
        if self.best is None:
            raise self._refusal()
        plans = [plan_of(self._simplest(self.best)), *self.ordered]
        taken = min(plans, key=lambda plan: plan.predicted_step_s)
        return replace(taken, notes={**taken.notes, **self.record.notes()})

    def _search(self) -> None:
        options = self.request.options
        if options.fastest and not self.hopeless:
            self._begin(self.names)
        if self.best is None:
            self._make_room()
        if self.best is None and options.fastest and not self.hopeless and self.places <= SMALL:
            self._begin(self.copying)
        if not options.fastest:
            return
        if self.best is not None or self._nearly_fits():
            self._improve()
        if self.orders and not options.simpler_within:
            self._put_in_faster_orders()

    def _simplest(self, best: Judged) -> Judged:
        """See `PlanOptions.simpler_within`."""
        if not (within := self.request.options.simpler_within):
            return best
        near = [j for j in self.best_of.values() if j.fits and j.step_s <= best.step_s * (1 + within)]
        taken = min(near, key=lambda j: (len(j.point.request.layout.placement), j.step_s))
        for other in near:
            if other.step_s < taken.step_s:
                self.record.note(self.record.passed_over, other.point.request.schedule, other.step_s)
        return taken

    def _begin(self, names: Sequence[str]) -> None:
        """Seeds of each place that schedules put stages in, and the schedules that are best with them."""
        starts: list[tuple[float, Point]] = []
        inline: list[tuple[str, Point]] = []
        asked = ""
        for name in names:
            try:
                request = self.way(name)
                search = request.search()
                if not search.large and not request.copies and not fits(search):
                    self.record.note(self.record.schedules, name, "no cut fits, even with all freed")
                    continue
                estimate = self.estimate(request, search)
            except (PlanError, ScheduleError) as error:
                self.errors.append(error)
                self.record.note(self.record.schedules, name, error.message)
                continue
            layout = request.layout
            if layout.in_line and not inline:
                inline, asked = list(self.seeds(request, self.record)), name
                level = self.level_cuts(ClosedForm(estimate.cuts))[:1]
                begin = [*inline, *((LEVEL, Point(request, search, cuts)) for cuts in level)]
                for planner, point in sorted(begin, key=lambda seed: self._closely(seed[1])):
                    self._note_planner(planner, point, self.judge(point, planner))
            seeds = self.level.get(layout)
            if seeds is None:
                seeds = self.level[layout] = self.level_cuts(ClosedForm(estimate.cuts))
                if layout.in_line:
                    seeds += [point.cuts for _, point in inline if not point.search.model.readers.order]
            starts_at = np.array([estimate.cuts.places(cuts) for cuts in seeds], dtype=np.int64)
            if not len(starts_at):
                continue
            first = starts_at[int(np.argmin(estimate.steps(starts_at)))]
            best = (climb(estimate, first) or [first])[0]
            for cuts in dict.fromkeys(map(estimate.cuts.cut, (best, estimate.cuts.at_borders(best)))):
                seconds = float(estimate.steps(estimate.cuts.places(cuts)[None])[0])
                starts.append((seconds, Point(request, search, cuts)))
        seen, reordered = Counter[Layout](), set[Layout]()
        for number, (seconds, point) in enumerate(sorted(starts, key=lambda start: start[0])):
            limit = inf if self.best is None else self.best.step_s * (1 + FAR)
            layout = point.request.layout
            if not self.tiny and number >= FEW and seen[layout] >= EACH and seconds > limit:
                self.record.died["short step"] += 1
                continue
            judged = self.judge(point, "schedules")
            seen[layout] += judged is None or judged.fits
            if judged is None and layout not in reordered and not layout.in_line:
                reordered.add(layout)
                for other in self.cuts_in_branch_orders(point):
                    self.judge(other, "branches")
            several = self.alone and not layout.in_line
            if (several or self.tiny) and point.request.schedule != asked and not self._near(CLOSEST):
                for planner, found in self.seeds(point.request, self.record):
                    self.judge(found, planner)

    def cuts_in_branch_orders(self, point: Point) -> Iterator[Point]:
        """Cuts whose ranks take equally long, in several orders of branches."""
        request = point.request
        for order in request.orders_to_try:
            own = replace(request.search(order), treatments=request.treatments if self.pressed else ())
            estimate = self.estimate(request, own)
            for cuts in self.level_cuts(ClosedForm(estimate.cuts))[:1]:
                for places in climb(estimate, estimate.cuts.places(cuts))[:PROPOSED]:
                    yield replace(point, search=own, cuts=estimate.cuts.cut(places))

    def _make_room(self) -> None:
        """Cuts that keep the caps, whatever their step; of a large model, or if any plan will do, in few
        schedules."""
        names, options = [*self.names, *self.copying], self.request.options
        if not (options.fastest or options.schedules or options.chunks):
            least = HOLD_LITTLE if self.places <= SMALL and not options.schedule else ()
            names = [options.named_schedule, *least]
        elif self.places > SMALL and not options.schedules:
            names = [name for name in names if name in (self.names[0], *HOLD_LITTLE)]
        for name in names:
            if self.best is not None and (name in self.copying or not options.fastest):
                return
            try:
                explained = self.explained and self.refused is None  # only the first refusal is told
                for planner, point in self.room(self.way(name), self.record, explained=explained):
                    self.judge(point, planner)
            except InfeasibleError as error:
                self.refused = self.refused or error
                if self.hopeless:
                    return
            except (PlanError, ScheduleError) as error:
                self.errors.append(error)

    def _closely(self, point: Point) -> float:
        """Seconds of a step, by the closed form."""
        cuts = CutTimes(point.search, point.request.layout, point.request.microbatches)
        return float(ClosedForm(cuts).steps(cuts.places(point.cuts)[None])[0])

    def level_cuts(self, estimate: ClosedForm) -> list[Cuts]:
        """Cuts whose ranks take equally long, from several starts."""
        cuts, found = estimate.cuts, []
        for bare in level_starts(cuts.layout):
            if (places := cuts.evenly(bare)) is not None:
                found += [cuts.cut(best) for best in climb(estimate, places)[:1]]
        return list(dict.fromkeys(found))

    def _note_planner(self, planner: str, point: Point, judged: Judged | None) -> None:
        judged = judged or self.tried.get(point.key)
        if planner != LEVEL and judged is not None and judged.fits:
            self.record.note(self.record.planners, planner, judged.step_s)
        elif planner != LEVEL:
            self.record.note(self.record.planners, planner, "its cut exceeds the caps, or is slower for sure")

    def lines(self) -> list[Judged]:
        """The best few, of different ways, of a tiny model all that are close and the best of each layout;
        and the closest of those that pass caps, if they are faster."""
        ranked = sorted(self.best_of.values(), key=lambda judged: judged.key)
        best_s = inf if self.best is None else self.best.step_s
        near = [judged for judged in ranked if judged.fits and judged.step_s <= best_s * (1 + CLOSE)]
        if not self.tiny:
            near = near[:LINES]
        else:
            first = {judged.point.request.layout: judged for judged in reversed(ranked) if judged.fits}
            near += [judged for judged in first.values() if judged not in near]
            best_s *= 1 + CLOSE
        return near + [j for j in ranked if not j.fits and j.step_s < best_s][:LINES]

    def _improve(self) -> None:
        for _ in range(ROUNDS):
            if self.best is not None and self._near(CLOSEST):
                return
            before = (self.closest.key if self.closest else (0, inf)) if self.best is None else self.best.key
            for name, axis in self.axes.items():
                for line in self.lines():
                    for point in axis(self, line):
                        self.judge(point, name)
            after = (self.closest.key if self.closest else (0, inf)) if self.best is None else self.best.key
            if after[0] == before[0] and after[1] >= before[1] * (1 - LITTLE):
                return

    def _nearly_fits(self) -> bool:
        """Whether moves may mend the closest of those that pass the caps."""
        caps = [device.memory_bytes for device in self.request.cluster.devices]
        return self.closest is not None and self.closest.key[0] <= MENDED * sum(caps) and self.places <= SMALL

    def _near(self, share: float) -> bool:
        """Whether no plan is faster than the best by more than such a share of the bound."""
        return self.best is None or self.best.step_s <= self.record.bound_s * (1 + share)

    def _put_in_faster_orders(self) -> None:
        if self.best is None or self.alone or self.request.graph.together or self._near(WORTH):
            return
        request = self.request
        costs = PlanCosts(request.graph, request.profile, request.cluster, request.options.sharing)
        large = self.places * len(self.request.cluster.devices) > SMALL
        for judged in [line for line in self.lines() if line.fits][: None if self.tiny else ORDERS]:
            if time.monotonic() > self.until:
                raise TimeIsUp
            below_s = min([self.best.step_s, *(plan.predicted_step_s for plan in self.ordered)])
            if not self.tiny and judged.step_s > below_s * (1 + WORTH):
                continue
            self.record.tried["order"] += 1
            plan = with_searched_order(
                plan_of(judged),
                costs,
                below_s=below_s,
                effort=EFFORT,
                library=judged is self.best and large,
                thorough=self.tiny,
            )
            if plan is not None:
                self.ordered.append(plan)
                gained = below_s - plan.predicted_step_s
                self.record.gained["order"] = self.record.gained.get("order", 0.0) + gained

    def _refusal(self) -> PlanError | ScheduleError:
        if self.refused is not None:
            return self.refused
        return self.errors[0] if self.errors else PlanError("no cut fits", hint="name another planner")


def key_of(found: Candidate) -> tuple[int, float]:
    """Bytes over the caps, one at least where a host has no room, or a stage alone on its rank; and seconds
    of the step. What several stages need together only the simulation knows."""
    misfits = found.host_shortage is not None or (found.layout.in_line and not found.fits)
    return max(sum(found.over), int(misfits)), found.timeline.step_s


def messages_of(
    found: Candidate, placement: Sequence[int], cluster: Cluster
) -> Mapping[tuple[int, int], float] | None:
    """Seconds of each edge of a candidate's stages; None of a chain."""
    edges = set(found.stages.between)
    if all(b - a == 1 for a, b in edges):
        return None
    seconds = message_seconds(found.stages, tuple(placement), cluster)
    return {pair: seconds(*pair) for a, b in edges for pair in ((a, b), (b, a))}


def plan_of(judged: Judged) -> Plan:
    """The plan, on the devices in the order of the cluster."""
    plan, order = judged.found.plan(), judged.point.order
    if not order:
        return plan
    at = {device: rank for rank, device in enumerate(order)}
    ranks = range(len(order))

    def moved(row: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(row[at[device]] for device in ranks) if row else row

    return replace(
        plan,
        placement=tuple(order[rank] for rank in plan.placement),
        schedule_rows=moved(plan.schedule_rows),  # type: ignore[arg-type]
        caps=moved(plan.caps),  # type: ignore[arg-type]
        peaks=moved(plan.peaks),  # type: ignore[arg-type]
    )


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
