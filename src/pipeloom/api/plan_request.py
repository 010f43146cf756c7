"""Planning: all that a plan is made from but the model's costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.errors import ConfigError, InfeasibleError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..planner import PLANNERS, Change, PlanOptions, Sample, limits, make_plan, plan_rows, what_if
from .advice import Attempts, advised
from .keeping import keeping_caps
from .largest_batch import MOST, captured_of, divisors
from .plan_costs import plan_placed

if TYPE_CHECKING:
    from ..tracer import Captured

__all__ = ["PLANNERS", "Change", "Planning", "limits", "plan_rows"]

Costs: TypeAlias = Profile | Mapping[str, Profile]


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How to plan.

    stages: one per device; where the schedule wants several on each, or replicas, the number of devices.
    microbatches: per step.  capped: plans name the devices' memory as their caps.
    global_batch: rows per step; where the micro-batch size varies, so does the number of micro-batches.
    local: the devices are processes of this machine, as many as there are stages, and share what it has.
    watch: told how many stages were weighed so far.
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
    watch: Callable[[int], None] | None = None

    def plan(
        self,
        graph: OpGraph,
        costs: Costs,
        size: int,
        *,
        explained: bool = True,
        largest: Callable[[], int | None] | None = None,
        captured: Captured | None = None,
    ) -> Plan:
        """The plan for micro-batches of `size` rows.

        explained: look for what would fit, if nothing does.  largest: says which size would.
        captured: where the graph is from, so that its stages can be traced: a plan for CPUs then keeps its
            caps by these too.
        Raises: PlanError; InfeasibleError if nothing fits under the caps.
        """
        count = self.microbatches_of(size)

        def made(cluster: Cluster) -> Plan:
            return replace(self, cluster=cluster)._made(graph, costs, count, explained)

        try:
            if captured is not None and self._runs_as_traced(captured):
                from .traced import traced_peaks

                found = keeping_caps(
                    made, self.cluster, lambda plan: traced_peaks(plan, captured, costs, self.cluster)
                )
            else:
                found = made(self.cluster)
        except InfeasibleError as error:
            if not explained:
                raise
            tried = Attempts(replace(self, watch=None), graph, costs, size, captured)
            raise advised(tried, error, largest) from None
        return replace(found, microbatch_size=size, caps=found.caps if self.capped else ())

    def _runs_as_traced(self, captured: Captured) -> bool:
        """Whether ranks will run the stages that can be traced here: on CPUs, from a graph of ops."""
        on_cpus = all(device.name.startswith("cpu") for device in self.cluster.devices)
        runs = self.options.weights in (None, "flush") and schedules.entry(self.schedule).weights == "flush"
        return self.capped and on_cpus and runs and not captured.graph.fallback

    def _made(self, graph: OpGraph, costs: Costs, microbatches: int, explained: bool) -> Plan:
        how: dict[str, Any] = {
            "schedule": self.schedule,
            "microbatches": microbatches,
            "strategy": self.strategy,
            "options": self.options,
            "explained": explained,
            "watch": self.watch,
        }
        if schedules.entry(self.schedule).place == "line":
            return make_plan(graph, costs, self.cluster, stages=self.stages, **how)
        return plan_placed(graph, costs, self.cluster, ranks=self.stages, **how)

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
            return range(1, MOST + 1)
        self.microbatches_of(1)
        directions = schedules.default_placement(self.schedule, self.stages)[0].replicas
        return [d for d in divisors(self.global_batch) if self.global_batch // d % directions == 0]

    def fits(self, sample: Sample) -> bool:
        """Whether there is a plan."""
        any_plan = replace(self, options=replace(self.options, fastest=False))
        try:
            any_plan.plan(
                sample.graph,
                sample.profiles,
                sample.size,
                explained=False,
                captured=captured_of(sample),
            )
        except (InfeasibleError, ScheduleError):  # the second: too few micro-batches for the schedule
            return False
        return True

    def changes(self, plan: Plan, sample: Sample) -> list[Change]:
        """What a bit more memory or bandwidth would make of a plan."""

        def planned(cluster: Cluster) -> Plan:
            other = replace(self, cluster=cluster)
            captured = captured_of(sample)
            return other.plan(sample.graph, sample.profiles, sample.size, explained=False, captured=captured)

        return what_if(plan, self.cluster, planned)
