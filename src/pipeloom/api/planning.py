"""Planning: all that a plan is made from but the model's costs; and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.errors import ConfigError, InfeasibleError, ScheduleError
from ..ir.graph import OpGraph
from ..ir.plan import Plan
from ..ir.profile import Profile
from ..planner import PlanOptions, make_plan
from ..planner.batches import Sample, interpolated, largest_size
from ..planner.whatif import Change, what_if
from .advice import Attempts, advised
from .placing import plan_placed

Costs: TypeAlias = Profile | Mapping[str, Profile]
Take: TypeAlias = Callable[[int], Sample]
"""Micro-batch size -> the model captured and profiled at it."""

MOST = 1 << 16
"""Rows of the largest micro-batch that is looked at."""

SURE = 3
"""Sizes that are captured as they are, from the largest downwards, before one is advised."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How to plan.

    stages: one per device; where the schedule wants several on each, or replicas, the number of devices.
    microbatches: per step.  capped: plans name the devices' memory as their caps.
    global_batch: rows per step; where the micro-batch size varies, so does the number of micro-batches.
    watch: told how many stages were weighed so far.
    """

    stages: int
    microbatches: int
    cluster: Cluster
    schedule: str = "1f1b"
    strategy: str = "exact"
    capped: bool = True
    global_batch: int | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    watch: Callable[[int], None] | None = None

    def plan(
        self, graph: OpGraph, costs: Costs, size: int, *,
        explained: bool = True, largest: Callable[[], int | None] | None = None,
    ) -> Plan:  # fmt: skip
        """The plan for micro-batches of `size` rows.

        explained: look for what would fit, if nothing does.  largest: says which size would.
        Raises: PlanError; InfeasibleError if nothing fits under the caps.
        """
        try:
            found = self._made(graph, costs, self.microbatches_of(size), explained)
        except InfeasibleError as error:
            if not explained:
                raise
            raise advised(Attempts(replace(self, watch=None), graph, costs, size), error, largest) from None
        return replace(found, microbatch_size=size, caps=found.caps if self.capped else ())

    def _made(self, graph: OpGraph, costs: Costs, microbatches: int, explained: bool) -> Plan:
        how: dict[str, Any] = {
            "schedule": self.schedule, "microbatches": microbatches, "strategy": self.strategy,
            "options": self.options, "explained": explained, "watch": self.watch,
        }  # fmt: skip
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
            divisors = [d for d in range(1, self.global_batch + 1) if self.global_batch % d == 0]
            near = sorted(sorted(divisors, key=lambda d: abs(d - size))[:3])
            raise ConfigError(
                f"a global batch of {self.global_batch} rows is no multiple of {size} rows per micro-batch",
                hint=f"use micro-batches of {', '.join(map(str, near))} rows",
            )
        return count

    def sizes(self) -> Sequence[int]:
        """Sizes of micro-batches that may be used, ascending."""
        whole = self.global_batch
        return range(1, MOST + 1) if whole is None else [d for d in range(1, whole + 1) if whole % d == 0]

    def fits(self, sample: Sample) -> bool:
        """Whether there is a plan."""
        any_plan = replace(self, options=replace(self.options, fastest=False))
        try:
            any_plan.plan(sample.graph, sample.profiles, sample.size, explained=False)
        except (InfeasibleError, ScheduleError):  # the second: too few micro-batches for the schedule
            return False
        return True

    def changes(self, plan: Plan, sample: Sample) -> list[Change]:
        """What a bit more memory or bandwidth would make of a plan."""
        return what_if(
            plan,
            self.cluster,
            lambda other: replace(self, cluster=other).plan(
                sample.graph, sample.profiles, sample.size, explained=False
            ),
        )


def largest_below(planning: Planning, known: Sample, take: Take) -> int | None:
    """The largest size below a known one that has a plan; 0 if none has.

    By interpolation between `known` and a micro-batch of the least size; None if these are of different
    ops. One row is looked at as it is: models may do without some ops then.
    """
    sizes = [size for size in planning.sizes() if size < known.size]
    quiet = replace(planning, watch=None)
    several = [size for size in sizes if size > 1]
    least = take(several[0]) if several else known
    if least.graph.fingerprint != known.graph.fingerprint:
        return None  # the model's ops depend on the size: there is nothing to interpolate
    if several:
        found = largest_size(several, lambda size: quiet.fits(interpolated(least, known, size)))
        near = [] if found is None else [size for size in several if size <= found][-SURE:]
        for size in reversed(near):  # interpolation may have been too bold
            if quiet.fits(take(size)):
                return size
    return 1 if 1 in sizes and quiet.fits(take(1)) else 0


def largest_plan(planning: Planning, start: int, take: Take) -> tuple[Plan, Sample]:
    """The plan with the largest micro-batches that fit, and the model at that size.

    start: a size to look around.  take: captures and profiles.
    Sizes are judged by interpolation between two that were taken, unless the model has other ops at one of
    them; the one found is taken too, and so are smaller ones until one fits.
    Raises: InfeasibleError if not even the smallest size fits.
    """
    take = cache(take)
    sizes = planning.sizes()
    at = min(range(len(sizes)), key=lambda index: abs(sizes[index] - start))
    if len(sizes) <= 2:
        some = next(filter(planning.fits, map(take, reversed(sizes))), take(sizes[0]))
        return planning.plan(some.graph, some.profiles, some.size), some
    near = max(at, 1)  # of one row, models may do without some ops: shapes are interpolated above it
    first, second = take(sizes[near]), take(sizes[near + 1 if near + 1 < len(sizes) else near - 1])
    alike = first.graph.fingerprint == second.graph.fingerprint

    def at_size(size: int) -> Sample:
        return interpolated(first, second, size) if alike else take(size)

    found = largest_size(sizes, lambda size: planning.fits(at_size(size)), start=at)
    index = sizes.index(found) if found is not None else 0
    while index > 0:
        sample = take(sizes[index])
        if planning.fits(sample):
            # Interpolation may have been too careful: the next size is tried as it is.
            while index + 1 < len(sizes) and planning.fits(take(sizes[index + 1])):
                index += 1
            break
        index -= 1
    sample = take(sizes[index])
    return planning.plan(sample.graph, sample.profiles, sample.size), sample
