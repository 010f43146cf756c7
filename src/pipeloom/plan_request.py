"""PlanRequest: all that a plan is made from but the model and its costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any, TypeVar

from .ir.action import STEP
from .ir.cluster import Cluster, Device, Link, is_cpu
from .ir.errors import ConfigError, InfeasibleError, PipeloomError, PlanError, ScheduleError
from .ir.plan import Plan, widened
from .ir.text import format_bytes, show_time
from .ir.weight_policies import FLUSH
from .lowering.passes import lower
from .plan_settings import PlanSettings
from .planner.joint.search_record import INTERRUPTED, searched_for
from .planner.microbatch_sizes import ProfiledModel
from .planner.plan_costs import PlanCosts
from .planner.plan_table import Change, changed_clusters, one_more, what_if
from .planner.planners import chooses, chooses_width, first_way, make_plan, ways_of
from .planner.refusals import closely
from .planner.request import PlanOptions, SearchWatch
from .planner.searched_order import ORDER_OF
from .planner.shape_search import divisors
from .runnable import refuse_master_weights, refuse_without_delay
from .schedules import registry
from .schedules.language.names import parse_name
from .simulator.simulate import simulate
from .width_search import WidthSearch, share_of

if TYPE_CHECKING:
    from .tracer.captured import Captured


def refuse_replicas(settings: PlanSettings, cluster: Cluster) -> None:
    replicas = settings.replicas
    if replicas == 1 and not settings.shard_optimizer:
        return
    shape, _ = registry.default_placement(settings.named_schedule, settings.ranks)
    if replicas == shape.replicas == 1:
        raise ConfigError(
            "the optimizer's state is to be shared out, but every stage has one replica",
            hint="add --replicas 2, or leave out --shard-optimizer",
        )
    if replicas > 1 and shape.replicas > 1:
        raise PlanError(
            f"schedule {settings.named_schedule} holds every stage on {shape.replicas} ranks by itself, so "
            f"it cannot have {replicas} replicas of each beside",
            hint="leave out --replicas, or choose a schedule of one direction, such as 1f1b",
        )
    if replicas > 1 and settings.devices > len(cluster.devices):
        raise PlanError(
            f"{replicas} replicas of {settings.ranks} stages are for {settings.devices} devices, there are "
            f"{len(cluster.devices)}",
            hint="use fewer --replicas or --ranks, or add devices",
        )


def refuse_by_delay(settings: PlanSettings) -> None:
    """Raises: ConfigError if something is asked for that softens a delay, and there is none; or that does not
    go with one."""
    policy = settings.weights or registry.entry(settings.named_schedule).weights
    if settings.master_weights:
        refuse_master_weights(policy)
    refuse_without_delay(settings, policy)


def sizes_for(batch: int, pipelines: int) -> list[int]:
    """Sizes of micro-batches, ascending, of which pipelines, or directions, get equally many of a batch."""
    sizes = [size for size in divisors(batch) if batch // size % pipelines == 0]
    if not sizes:
        raise ConfigError(
            f"a global batch of {batch} rows cannot be shared evenly by {pipelines} pipelines",
            hint=f"use a multiple of {pipelines} rows",
        )
    return sizes


def first_of_each(cluster: Cluster, width: int) -> Cluster:
    """Every W-th device, with the memory that all W replicas of its stage have."""
    devices = []
    for at in range(0, len(cluster.devices) // width * width, width):
        group = cluster.devices[at : at + width]
        devices.append(replace(group[0], memory_bytes=min(device.memory_bytes for device in group)))
    return replace(cluster, devices=tuple(devices))


class PassesCapsSideBySide(InfeasibleError):
    """A plan keeps its caps alone, and not as one of several. unseen: of each rank that
    passes its, the bytes that it holds beside those it holds alone."""

    def __init__(self, message: str, *, unseen: Mapping[int, int]) -> None:
        super().__init__(message)
        self.unseen = unseen


def plan_side_by_side(plan: Plan, width: int, costs: PlanCosts, cluster: Cluster) -> Plan:
    """Several pipelines like that of a plan, their step simulated with the sums of their gradients."""
    wide = widened(plan, width)
    caps = tuple(device.memory_bytes for device in cluster.devices[: len(wide.schedule_rows)])
    step = costs.simulate(replace(wide, caps=caps))
    each = enumerate(zip(step.rank_peaks, wide.peaks, caps, strict=True))
    unseen = {rank: peak - alone for rank, (peak, alone, cap) in each if peak > cap}
    for rank, (peak, cap) in enumerate(zip(step.rank_peaks, caps, strict=True)):
        if peak > cap:
            raise PassesCapsSideBySide(
                f"rank {rank} needs {format_bytes(peak)} as one of {width} replicas, its cap is "
                f"{format_bytes(cap)}{closely(peak, cap)}",
                unseen=unseen,
            )
    return replace(wide, caps=caps, peaks=step.rank_peaks, predicted_step_s=step.step_s)


TRIES = 7
"""Plans that are made at most, all but the first under lower caps."""

FAR_BELOW = 0.25
"""Plans that hold no more than this share of each cap are not traced. Stages with ops that the table does not
know, such as `lstm`, were found to hold 2.5 times what was planned."""


def plan_within_caps(
    search: Callable[[Cluster], Plan], cluster: Cluster, traced_peaks: Callable[[Plan], Sequence[int]]
) -> Plan:
    """The first plan that keeps the devices' memory side by side with its replicas, and by its traced stages.

    search: plans under the memory of a cluster.  traced_peaks: bytes that each rank of a plan holds.
    """
    caps = [device.memory_bytes for device in cluster.devices]
    lowered = list(caps)
    first: tuple[int, ...] = ()
    refused: InfeasibleError | None = None
    for _ in range(TRIES):
        try:
            plan = search(cluster.with_memory(lowered))
        except PassesCapsSideBySide as error:
            refused = refused or error
            for rank, unseen in error.unseen.items():
                lowered[rank] = max(1, min(lowered[rank] - 1, caps[rank] - unseen))
            continue
        except InfeasibleError as error:
            refused = refused or error
            break
        plan = replace(plan, caps=tuple(caps[: len(plan.caps)]))
        far_below = all(peak <= FAR_BELOW * cap for peak, cap in zip(plan.peaks, plan.caps, strict=True))
        peaks = plan.peaks if far_below else tuple(traced_peaks(plan))
        first = first or peaks
        over = [rank for rank, size in enumerate(peaks) if size > caps[rank]]
        if not over:
            return plan
        for rank in over:
            beside = peaks[rank] - plan.peaks[rank]
            lowered[rank] = max(1, min(lowered[rank] - 1, caps[rank] - beside))
    if not first:
        assert refused is not None, "nothing was traced"
        raise refused
    rank, most = max(enumerate(first), key=lambda pair: pair[1] - caps[pair[0]])
    raise InfeasibleError(
        f"as planned, all fits, but rank {rank} holds {format_bytes(most)} when its stage is traced, and its "
        f"device's cap is {format_bytes(caps[rank])}{closely(most, caps[rank])}; planning for less found no "
        "plan that keeps it"
    )


def traced_peaks(
    plan: Plan, captured: Captured, costs: PlanCosts, *, compiled: bool = False
) -> tuple[int, ...]:
    """Bytes that each rank holds at its peak, by the graphs of its stages, as `Forecast.untimed` says before
    they run. The plan has caps.

    compiled: by the graphs that are compiled, whose backwards return the gradients of parameters.
    """
    from .rank_stages import make_variant  # only now: tracing needs torch
    from .runtime.calibrate import graph_memory
    from .runtime.transport import SMALL_BYTES

    stages = plan.stage_graph(captured.graph)
    every = range(len(plan.stages))
    variant = make_variant(captured, plan, stages, every, device="cpu", compiled=compiled, policy=plan.memory)
    traced = [graph_memory(variant.functions[s], stages) for s in every] * plan.replicas
    # Planners know of a stage what its graphs do not say: parameters, batch and the like.
    completed = [
        replace(
            graphs,
            static_bytes=planned.static_bytes,
            tied_bytes=planned.tied_bytes,
            for_owners=planned.for_owners,
            transient_bytes={**graphs.transient_bytes, STEP: planned.transient_bytes.get(STEP, 0)},
        )
        for graphs, planned in zip(traced, costs.stages(plan), strict=True)
    ]
    return simulate(
        lower(plan.as_schedule, variant.stages, policy=plan.memory, updates=plan.updates, clips=plan.clips),
        variant.stages,
        tuple(completed),
        Cluster(
            devices=tuple(Device(name="cpu", memory_bytes=cap) for cap in plan.caps),
            within_node=Link(bandwidth_bytes_per_s=1e15),
        ),
        caps=plan.caps,
        small_bytes=SMALL_BYTES,
    ).rank_peaks


T = TypeVar("T")
E = TypeVar("E", bound=PipeloomError)


def fitting(
    candidates: Iterable[T],
    plan_of: Callable[[T], Plan],
    *,
    passed: type[E] | tuple[type[E], ...] = (InfeasibleError, ScheduleError),  # type: ignore[assignment]
    refusals: list[E] | None = None,
) -> Iterator[tuple[Plan, T]]:
    """The candidates that have a plan, with it: each is tried when the next one is asked for.

    passed: if one raises these, a ScheduleError where there are too few micro-batches, the next is tried.
    refusals: gets what was raised.
    """
    for candidate in candidates:
        try:
            plan = plan_of(candidate)
        except passed as error:
            if refusals is not None:
                refusals.append(error)
        else:
            yield plan, candidate


def fastest(plans: Iterable[tuple[Plan, T]]) -> tuple[Plan, T] | None:
    """The plan with the shortest step, and its candidate; the first one, if steps differ by rounding only."""
    best: tuple[Plan, T] | None = None
    for plan, candidate in plans:
        if best is None or plan.predicted_step_s < best[0].predicted_step_s * (1 - 1e-9):
            best = plan, candidate
    return best


COMPILED = "compiled"
"""Note of a plan that was made with the times of compiled functions: how they compare with eager ones."""


def settings_of(plan: Plan) -> dict[str, Any]:
    """The settings that a plan was made with, as far as it says them, to plan again by. Of its planner and
    schedule, which need not be any that is known here, ask `runnable.names_to_plan_by`."""
    settings: dict[str, Any] = {
        "ranks": plan.ranks // plan.width,
        "replicas": plan.width,
        "shard_optimizer": plan.shard_optimizer,
        "weights": plan.weights,
        "delay_correction": plan.delay_correction,
        "warm_up_with_flush": plan.warm_up_with_flush,
        "clips": plan.clips,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
    }
    asked = {"compile": COMPILED in plan.notes, "master_weights": plan.master_weights}
    return settings | {name: True for name, is_set in asked.items() if is_set}


LARGEST_MICROBATCH = 1 << 16
"""Rows of the largest micro-batch that is looked at."""


LENGTHS = "lengths"
"""Note of a plan that was made for several sequence lengths: what a step takes at each."""


def times_of(plan: Plan) -> list[str]:
    beginnings = {COMPILED: "times of compiled functions", LENGTHS: "the mean of steps by sequence length"}
    return [f"{begins}: {plan.notes[key]}" for key, begins in beginnings.items() if key in plan.notes]


@dataclass(frozen=True, kw_only=True)
class CapturedModel(ProfiledModel):
    """What its stages can be traced from, too.

    by_length: where batches have several sequence lengths, the share and the model of each. It is then itself
        that of the longest, with times that are means over the batches.
    """

    captured: Captured
    by_length: Mapping[int, tuple[float, CapturedModel]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """How to plan: settings, with what follows from them for a model and a machine.

    options: chunks are part of the schedule's name.  cluster: the devices that the settings mean.
    capped: plans name the devices' memory as their caps.
    local: the devices are processes of this machine, as many as there are ranks, and share what it has.
    watch: told how the search goes on.
    """

    options: PlanOptions
    cluster: Cluster
    capped: bool = True
    local: bool = False
    watch: SearchWatch | None = None

    def changed(self, **changes: Any) -> PlanRequest:
        return replace(self, options=self.options.changed(**changes))

    @property
    def until(self) -> float:
        """When its time limit is over if it begins now."""
        return time.monotonic() + (self.options.time_limit or inf)

    def limited_to(self, until: float) -> PlanRequest:
        """With a time limit of what is left until then, at least a second."""
        return self if until == inf else self.changed(time_limit=max(1, ceil(until - time.monotonic())))

    def plan(self, model: ProfiledModel, *, explained: bool = True) -> Plan:
        """The plan for a model at one micro-batch size. Of a captured one the stages can be traced: a plan
        for CPUs then keeps its caps by these too.

        explained: if nothing fits, look for how far it is from fitting, which takes longer.
        """
        if self.chooses_width and not model.graph.together:
            return WidthSearch(self, model, explained=explained).run()
        return self._plan_shape(model, explained)

    @property
    def chooses_width(self) -> bool:
        """Whether the planner looks for the fastest number of pipelines side by side, equal ones."""
        alike = len({device.name for device in self.cluster.devices[: self.options.ranks]}) == 1
        return alike and chooses_width(self.options)

    def _plan_shape(self, model: ProfiledModel, explained: bool) -> Plan:
        """With as many ranks and replicas as the options say."""
        options = self.options
        refuse_replicas(options, self.cluster)
        refuse_by_delay(options)
        microbatches = share_of(self.microbatches_of(model.size), options.replicas)
        costs = PlanCosts(model.graph, model.profiles, self.cluster)
        until = self.until

        def search(cluster: Cluster) -> Plan:
            way = self.limited_to(until)
            if options.replicas == 1:
                return way._search(costs, cluster, microbatches, explained)
            return way._plan_wide(costs, cluster, microbatches, explained)

        known = model if isinstance(model, CapturedModel) else None

        def untraced(_: Plan) -> Sequence[int]:
            return ()

        peaks: Callable[[Plan], Sequence[int]] = untraced
        if known is not None and self._runs_as_traced(known.captured):
            peaks = partial(traced_peaks, captured=known.captured, costs=costs, compiled=options.compile)
        plan = plan_within_caps(search, self.cluster, peaks)
        said = next((p.compiled for p in model.profiles.values() if p.compiled), None)
        notes = plan.notes if said is None else {**plan.notes, COMPILED: said}
        split = {} if known is None else known.captured.split_words
        caps = plan.caps if self.capped else ()
        plan = replace(plan, microbatch_size=model.size, caps=caps, notes=notes, split_words=split)
        return self._mean_step(plan, known.by_length) if known is not None and known.by_length else plan

    def _mean_step(self, plan: Plan, by_length: Mapping[int, tuple[float, CapturedModel]]) -> Plan:
        """The same plan with the mean of its steps at each length. The step with mean times would be shorter,
        because the slowest stage need not be the same at each length."""
        mean_s, said = 0.0, []
        for length, (share, model) in by_length.items():
            step_s = PlanCosts(model.graph, model.profiles, self.cluster).simulate(plan).step_s
            mean_s += share * step_s
            said.append(f"{length} ({share:.0%}) {show_time(step_s)}")
        return replace(plan, predicted_step_s=mean_s, notes={**plan.notes, LENGTHS: ", ".join(said)})

    def _plan_wide(self, costs: PlanCosts, cluster: Cluster, microbatches: int, explained: bool) -> Plan:
        """The fastest plan for all replicas. Only here it is known what summing their gradients takes, so
        others are tried beside a planner of a DAG of stages. microbatches: of each pipeline."""
        devices = first_of_each(cluster, self.options.replicas)
        one = PlanCosts(costs.graph, costs.profiles, devices)
        replicas, refused = self.options.replicas, list[InfeasibleError]()

        def wide(way: PlanRequest) -> Plan:
            return plan_side_by_side(
                way._search(one, devices, microbatches, explained), replicas, costs, self.cluster
            )

        ways = (replace(self, options=way) for way in ways_of(self.options))
        best = fastest(fitting(ways, wide, passed=InfeasibleError, refusals=refused))
        if best is None:
            again = (error for error in refused if isinstance(error, PassesCapsSideBySide))
            raise next(again, refused[0])
        return replace(best[0], planner=self.options.planner)

    def _search(self, costs: PlanCosts, cluster: Cluster, microbatches: int, explained: bool) -> Plan:
        """For one pipeline."""
        asked = replace(self.options, microbatches=microbatches)
        return make_plan(costs.graph, costs.profiles, cluster, asked, explained=explained, watch=self.watch)

    def _runs_as_traced(self, captured: Captured) -> bool:
        """Whether ranks will run the stages that can be traced here: on CPUs, from a graph of ops."""
        on_cpus = all(is_cpu(device.name) for device in self.cluster.devices)
        runs = (
            self.options.weights in (None, FLUSH)
            and registry.entry(self.options.named_schedule).weights == FLUSH
        )
        return self.capped and on_cpus and runs and not captured.graph.fallback

    def microbatches_of(self, size: int) -> int:
        batch, width = self.options.global_batch, self.options.replicas
        if batch is None:
            return self.options.microbatches
        if batch % (size * width):
            near = sorted(sorted(sizes_for(batch, width), key=lambda d: abs(d - size))[:3])
            of_each = f" on each of {width} replicas" if width > 1 else ""
            raise ConfigError(
                f"a global batch of {batch} rows is no multiple of {size} rows per micro-batch{of_each}",
                hint=f"use micro-batches of {', '.join(map(str, near))} rows",
            )
        return batch // size

    def sizes(self) -> Sequence[int]:
        """Sizes of micro-batches that may be used, ascending: as many per step as the schedule has
        directions, or a multiple."""
        options, batch = self.options, self.options.global_batch
        if batch is None:
            return range(1, LARGEST_MICROBATCH + 1)
        shape, _ = registry.default_placement(options.named_schedule, options.ranks)
        return sizes_for(batch, shape.replicas * options.replicas)

    def any_plan(self, model: ProfiledModel) -> Plan:
        """The first plan found that keeps the caps, which need not be the fastest."""
        return self.changed(fastest=False).plan(model, explained=False)

    @property
    def for_advice(self) -> PlanRequest:
        """The same, unwatched, and faster: a planner of one schedule in place of one that tries many."""
        return replace(self, options=first_way(self.options).changed(any_width=False), watch=None)

    def fits(self, model: ProfiledModel) -> bool:
        return next(fitting([model], self.any_plan), None) is not None

    def changes(self, plan: Plan, model: ProfiledModel) -> list[Change]:
        """What a bit more memory or bandwidth, or one more device would make of a plan: it is planned again
        as it was asked for, where the schedule was chosen with this one, and its order without copies."""
        if (told := searched_for(plan)) is not None and told["ended"] == INTERRUPTED:
            return []  # nor is the user to wait for this
        schedule = plan.notes.get(ORDER_OF, plan.schedule)
        width, ranks = plan.width, plan.ranks // plan.width
        same = replace(self, watch=None).changed(ranks=ranks, replicas=width, any_width=False)
        if chooses(self.options):
            names = dict.fromkeys((schedule, parse_name(schedule).plain(ranks)))
            same = same.changed(schedules=tuple(names))

        clusters = dict(changed_clusters(self.cluster))
        wider = one_more(self.cluster, ranks)
        if not self.local and width == 1:
            clusters["one more device"] = wider
        if (limit_s := self.options.time_limit) is not None:  # for all of them together
            same = same.changed(time_limit=max(1, limit_s // len(clusters)))

        def again(cluster: Cluster) -> Plan:
            way = same.changed(ranks=ranks + 1) if cluster is wider else same
            found = replace(way, cluster=cluster).plan(model, explained=False)
            if cluster is wider:
                return found
            if isinstance(model, CapturedModel) and model.by_length:
                kept_s = replace(way, cluster=cluster)._mean_step(plan, model.by_length).predicted_step_s
            else:
                kept_s = PlanCosts(model.graph, model.profiles, cluster).simulate(plan).step_s
            return replace(found, predicted_step_s=min(found.predicted_step_s, kept_s))

        return what_if(plan, clusters, again)
