"""Planning: all that a plan is made from but the model's costs; and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

from .. import schedules
from ..ir.cluster import Cluster
from ..ir.errors import CaptureError, ConfigError, InfeasibleError, ScheduleError
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

AROUND = (0, 1, -1, 2, -2, 4)
"""Places around the size to begin with at which two sizes to interpolate between are looked for."""


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
            near = sorted(sorted(_divisors(self.global_batch), key=lambda d: abs(d - size))[:3])
            raise ConfigError(
                f"a global batch of {self.global_batch} rows is no multiple of {size} rows per micro-batch",
                hint=f"use micro-batches of {', '.join(map(str, near))} rows",
            )
        return count

    def sizes(self) -> Sequence[int]:
        """Sizes of micro-batches that may be used, ascending: as many per step as the schedule has
        directions, or a multiple. Raises: ConfigError if a global batch allows none."""
        if self.global_batch is None:
            return range(1, MOST + 1)
        directions = schedules.usual(self.schedule, self.stages)[0].replicas
        found = [d for d in _divisors(self.global_batch) if self.global_batch // d % directions == 0]
        if not found:
            raise ConfigError(
                f"{self.schedule} runs in {directions} directions, which cannot share a global batch of "
                f"{self.global_batch} rows",
                hint=f"use a multiple of {directions}",
            )
        return found

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


def _divisors(whole: int) -> list[int]:
    """Of the sizes that are looked at, those that divide a batch.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, min(whole, MOST) + 1) if whole % d == 0]


def usable(take: Take) -> Callable[[int], Sample | None]:
    """`take` for sizes that nobody asked for: None where the model cannot be captured at one."""

    @cache
    def taken(size: int) -> Sample | None:
        try:
            return take(size)
        except CaptureError:
            return None

    return taken


def largest_below(planning: Planning, known: Sample, take: Take) -> int | None:
    """The largest size below a known one that has a plan; 0 if none has.

    By interpolation between `known` and a micro-batch of the least size at which the model can be captured;
    None if there is none, or these are of different ops. One row is looked at as it is: models may do
    without some ops then.
    """
    sizes = [size for size in planning.sizes() if size < known.size]
    quiet, taken = replace(planning, watch=None), usable(take)

    def fits(size: int) -> bool:
        sample = taken(size)
        return sample is not None and quiet.fits(sample)

    several = [size for size in sizes if size > 1]
    if several:
        least = next((sample for sample in map(taken, several[:SURE]) if sample is not None), None)
        if least is None or least.graph.fingerprint != known.graph.fingerprint:
            return None  # there is nothing to interpolate
        above = [size for size in several if size >= least.size]
        found = largest_size(above, lambda size: quiet.fits(interpolated(least, known, size)))
        near = [] if found is None else [size for size in above if size <= found][-SURE:]
        for size in reversed(near):  # interpolation may have been too bold
            if fits(size):
                return size
    return 1 if 1 in sizes and fits(1) else 0


def largest_plan(planning: Planning, start: int, take: Take) -> tuple[Plan, Sample]:
    """The plan with the largest micro-batches that fit, and the model at that size.

    start: a size to look around.  take: captures and profiles.
    Sizes are judged by interpolation between two that were taken, unless the model has other ops at one of
    them; the one found is taken too, and so are smaller ones until one fits. Sizes at which the model cannot
    be captured are passed over.
    Raises: InfeasibleError if not even the smallest size fits; CaptureError if the model cannot be captured
        at the sizes looked at.
    """
    take = cache(take)
    taken, sizes = usable(take), planning.sizes()
    at = min(range(len(sizes)), key=lambda index: abs(sizes[index] - start))
    near = min(max(at, 1), len(sizes) - 1)  # of one row, models may do without some ops: begun above it
    some = (taken(sizes[near + step]) for step in AROUND if 0 <= near + step < len(sizes))
    known = list(islice((sample for sample in some if sample is not None), 2)) or [take(sizes[at])]
    alike = len(known) > 1 and known[0].graph.fingerprint == known[1].graph.fingerprint
    between = alike and len(sizes) > 2

    def fits(index: int) -> bool:
        sample = taken(sizes[index])
        return sample is not None and planning.fits(sample)

    def seems_to_fit(size: int) -> bool:
        sample = interpolated(known[0], known[1], size) if between else taken(size)
        return sample is not None and planning.fits(sample)

    found = largest_size(sizes, seems_to_fit, start=at)
    index = sizes.index(found) if found is not None else 0
    while index > 0:
        if fits(index):
            # Interpolation may have been too careful: the next size is tried as it is.
            while index + 1 < len(sizes) and fits(index + 1):
                index += 1
            break
        index -= 1
    sample = taken(sizes[index]) or min(known, key=lambda sample: sample.size)
    return planning.plan(sample.graph, sample.profiles, sample.size), sample
