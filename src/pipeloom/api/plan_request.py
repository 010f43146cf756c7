"""PlanRequest: all that a plan is made from but the model and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..ir.cluster import Cluster
from ..ir.errors import ConfigError, InfeasibleError, PlanError, ScheduleError
from ..ir.plan import Plan
from ..ir.weight_policy import FLUSH
from ..planner.ask_planners import FOUND_BY, fastest_named
from ..planner.choose_schedule import plain_of
from ..planner.make_plan import first_way, make_plan
from ..planner.microbatch_sizes import ProfiledModel
from ..planner.plan_costs import PlanCosts
from ..planner.registry import planner
from ..planner.request import PlanOptions
from ..planner.search_order import ORDER_OF
from ..planner.search_watch import SearchWatch
from ..planner.shape_search import divisors
from ..planner.what_if import Change, what_if
from ..schedules import registry
from .side_by_side import first_of_each, plan_side_by_side, refuse_sharding, refuse_width, share_of

if TYPE_CHECKING:
    from ..tracer.captured import Captured


COMPILED = "compiled"
"""Note of a plan that was made with the times of compiled functions: how they compare with eager ones."""

LARGEST_MICROBATCH = 1 << 16
"""Rows of the largest micro-batch that is looked at."""


def times_of(plan: Plan) -> list[str]:
    """Of a plan for compiled stages the sentence that says what its times are of; none of another."""
    told = plan.notes.get(COMPILED)
    return [] if told is None else [f"times of compiled functions: {told}"]


@dataclass(frozen=True, kw_only=True)
class CapturedModel(ProfiledModel):
    """A profiled model with what its stages can be traced from."""

    captured: Captured


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """How to plan.

    stages: the number of devices of one pipeline. Most schedules put one stage on each, so that it is also
        the number of stages; others put several or replicas on each.
    microbatches: per step, of all replicas together.  width: replicas of each stage, side by side.
    capped: plans name the devices' memory as their caps.
    global_batch: rows per step; where the micro-batch size varies, so does the number of micro-batches.
    local: the devices are processes of this machine, as many as there are ranks, and share what it has.
    watch: told how the search goes on.
    compiled: ranks will pass their stages to torch.compile.
    """

    stages: int
    microbatches: int
    cluster: Cluster
    schedule: str = "1f1b"
    strategy: str = "exact"
    capped: bool = True
    local: bool = False
    global_batch: int | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    watch: SearchWatch | None = None
    width: int = 1
    compiled: bool = False

    @property
    def ranks(self) -> int:
        """Devices that are used."""
        return self.stages * self.width

    def plan(self, model: ProfiledModel, *, explained: bool = True) -> Plan:
        """The plan for a model at one micro-batch size. Of a captured one the stages can be traced: a plan
        for CPUs then keeps its caps by these too.

        explained: if nothing fits, look for how far it is from fitting, which takes longer.
        Raises: PlanError; InfeasibleError if nothing fits under the caps.
        """
        refuse_width(self.schedule, self.stages, self.width, self.cluster)
        if self.options.shard_optimizer:
            refuse_sharding(self.schedule, self.stages, self.width)
        microbatches = share_of(self.microbatches_of(model.size), self.width)
        costs = PlanCosts(model.graph, model.profiles, self.cluster)

        def search(cluster: Cluster) -> Plan:
            if self.width == 1:
                return self._search(costs, cluster, microbatches, explained)
            return self._plan_wide(costs, cluster, microbatches, explained)

        if isinstance(model, CapturedModel) and self._runs_as_traced(model.captured):
            from .verify_caps import plan_within_caps, traced_peaks  # here, since tracing needs torch

            captured = model.captured
            plan = plan_within_caps(
                search,
                self.cluster,
                lambda plan: traced_peaks(plan, captured, costs, compiled=self.compiled),
            )
        else:
            plan = search(self.cluster)
        said = next((p.compiled for p in model.profiles.values() if p.compiled), None)
        told = {} if said is None else {COMPILED: said}
        return replace(
            plan,
            microbatch_size=model.size,
            caps=plan.caps if self.capped else (),
            notes={**plan.notes, **told},
        )

    def _plan_wide(self, costs: PlanCosts, cluster: Cluster, microbatches: int, explained: bool) -> Plan:
        """The fastest plan for all replicas: what the sums of their gradients take is seen only here, so that
        beside a planner of a DAG of stages others are asked.

        microbatches: of each pipeline.  Raises: InfeasibleError if nothing fits.
        """
        devices = first_of_each(cluster, self.width)
        one = PlanCosts(costs.graph, costs.profiles, devices)
        asks = planner(self.strategy).asks and (self.options.planners or planner(self.strategy).asks)
        plans: dict[str, Plan] = {}
        refusals: dict[str, PlanError] = {}
        for name in asks or (self.strategy,):
            for way in replace(self, strategy=name)._ways():
                try:
                    found = plan_side_by_side(
                        way._search(one, devices, microbatches, explained), self.width, costs, cluster
                    )
                except InfeasibleError as error:
                    refusals.setdefault(name, error)
                    continue
                if name not in plans or found.predicted_step_s < plans[name].predicted_step_s:
                    plans[name] = replace(found, planner=name)
        if not plans:
            raise next(iter(refusals.values()))
        return fastest_named(plans, refusals, self.strategy) if asks else plans[self.strategy]

    def _ways(self) -> list[PlanRequest]:
        """The same, and where stages may run side by side also as a chain and by planners of chains."""
        asked, options = planner(self.strategy), self.options
        if asked.propose is None or not options.branches or not options.fastest:
            return [self]
        in_a_row = replace(self, options=replace(options, branches=False))
        return [self, in_a_row, *(replace(self, strategy=other) for other in asked.also)]

    def _search(self, costs: PlanCosts, cluster: Cluster, microbatches: int, explained: bool) -> Plan:
        """The planner's plan for one pipeline under the memory of a cluster's devices."""
        asked = replace(self.options, width=self.width)
        return make_plan(
            costs.graph,
            costs.profiles,
            cluster,
            stages=self.stages,
            schedule=self.schedule,
            microbatches=microbatches,
            strategy=self.strategy,
            options=asked,
            explained=explained,
            watch=self.watch,
        )

    def _runs_as_traced(self, captured: Captured) -> bool:
        """Whether ranks will run the stages that can be traced here: on CPUs, from a graph of ops."""
        on_cpus = all(device.name.startswith("cpu") for device in self.cluster.devices)
        runs = self.options.weights in (None, FLUSH) and registry.entry(self.schedule).weights == FLUSH
        return self.capped and on_cpus and runs and not captured.graph.fallback

    def microbatches_of(self, size: int) -> int:
        """Micro-batches per step of `size` rows. Raises: ConfigError if they do not make up the batch."""
        if self.global_batch is None:
            return self.microbatches
        if self.global_batch < 1:
            raise ConfigError(f"a global batch of {self.global_batch} rows", hint="use at least 1")
        count, rest = divmod(self.global_batch, size)
        if rest or not count:
            near = sorted(sorted(divisors(self.global_batch), key=lambda d: abs(d - size))[:3])
            raise ConfigError(
                f"a global batch of {self.global_batch} rows is no multiple of {size} rows per micro-batch",
                hint=f"use micro-batches of {', '.join(map(str, near))} rows",
            )
        return count

    def sizes(self) -> Sequence[int]:
        """Sizes of micro-batches that may be used, ascending: as many per step as the schedule has
        directions, or a multiple. Raises: ConfigError if the global batch has no rows."""
        if self.global_batch is None:
            return range(1, LARGEST_MICROBATCH + 1)
        self.microbatches_of(1)
        directions = registry.default_placement(self.schedule, self.stages)[0].replicas * self.width
        return [d for d in divisors(self.global_batch) if self.global_batch // d % directions == 0]

    def any_plan(self, model: ProfiledModel) -> Plan:
        """The first plan found that keeps the caps, which need not be the fastest; raises as `plan`."""
        first = replace(self, options=replace(self.options, fastest=False))
        return first.plan(model, explained=False)

    @property
    def for_advice(self) -> PlanRequest:
        """The same, unwatched, and faster: of a planner of many schedules the first that it tries."""
        strategy, schedule = first_way(self.strategy, self.schedule)
        return replace(self, strategy=strategy, schedule=schedule, watch=None)

    def fits(self, model: ProfiledModel) -> bool:
        """Whether there is a plan."""
        try:
            self.any_plan(model)
        except (InfeasibleError, ScheduleError):  # the second: too few micro-batches for the schedule
            return False
        return True

    def changes(self, plan: Plan, model: ProfiledModel) -> list[Change]:
        """What a bit more memory or bandwidth would make of a plan: it is planned again as it was asked for,
        where several planners were asked by the one whose plan it is, and where that chose the schedule with
        this one, and its order without copies."""
        found_by = plan.notes.get(FOUND_BY)
        schedule = plan.notes.get(ORDER_OF, plan.schedule)
        names = {schedule: None}
        if planner(found_by or self.strategy).chooses_schedule:
            names[plain_of(schedule, self.stages)] = None
        options = replace(self.options, schedules=tuple(names), planners=(found_by,) if found_by else ())
        same = replace(self, options=options)
        return what_if(
            plan, self.cluster, lambda cluster: replace(same, cluster=cluster).plan(model, explained=False)
        )
