"""What to do where no plan fits. Each piece of advice was followed before it is given, and led to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil, sqrt

from .ir.cluster import MOST_BYTES, Cluster, Device
from .ir.errors import InfeasibleError, PlanError, ScheduleError
from .ir.memory_policy import Treatment
from .ir.plan import Plan
from .ir.text import enough_bytes, parse_bytes
from .plan_request import PlanRequest, first_of_each, fitting
from .planner.microbatch_sizes import ProfiledModel
from .planner.planners import chooses, planner
from .planner.refusals import NoCutFits, state_passes_caps
from .schedules import registry

MARGINS = (1.0, 1.01, 1.03, 1.1, 1.25, 1.6, 2.0, 3.0, 4.0)
"""What is tried of the caps that fit by estimate: a simulated schedule may hold more than that, and where
stages share a device, each has an equal part of it, however unequal they are."""

REFINED_MARGIN = 1.25
"""Where only a larger one does, the least between it and the one before is sought."""

TOLERANCE = 1.02
"""Up to this ratio the least memory is sought between one that does and one that does not."""

MORE_STAGES = (1, 2, 3, 4, 6)
"""Stages beyond those asked for that are tried where no search says how many."""

LIMIT_S = 60.0
"""Once so long was tried, only what is cheap to say is said."""

REFINED_S = 15.0
"""So long the least memory is made smaller: other advice wants its time, too."""

TRIED_S = 5
"""So long a planner that searches tries whether less memory does."""

TREATMENT_ADVICE: dict[tuple[Treatment, ...], str] = {
    ("recompute",): "let residuals be recomputed (--treatments recompute)",
    ("recompute", "offload"): "let residuals be recomputed or offloaded (--treatments both)",
}
FREEING_PLANNER = "dawnpiper"
"""A planner that frees memory, and the fastest of those to ask."""

SMALL_GRAPH = 200
"""Ops of a graph up to which the planner that was asked is asked again about treatments."""


def plan_with_advice(
    request: PlanRequest, model: ProfiledModel, largest: Callable[[], int | None] | None = None
) -> Plan:
    """The plan of a request; if nothing fits, an InfeasibleError that says what helps.

    largest: the largest micro-batch size with a plan, 0 if none, None if unknown.
    """
    try:
        return request.plan(model)
    except InfeasibleError as error:
        attempts = _Attempts(request.for_advice, model, asked=request)
        hints = [*attempts.memory(error), *attempts.stages(error), *attempts.freeing()]
        devices = first_of_each(request.cluster, request.options.replicas)
        rows_matter = not state_passes_caps(model.graph, devices, request.options.sharing)
        if size := largest() if largest is not None and rows_matter else None:
            hints.append(f"use micro-batches of {'1 row' if size == 1 else f'at most {size} rows'}")
        raise InfeasibleError(error.message, hint=", or ".join(hints) or None) from None


@dataclass(frozen=True)
class _Attempts:
    """The request that failed, tried again with something changed. asked: as it was."""

    request: PlanRequest
    model: ProfiledModel
    asked: PlanRequest
    begin_s: float = field(default_factory=time.monotonic)

    def plan(self, changed: PlanRequest) -> Plan | None:
        tried = fitting([self.model], changed.any_plan, passed=(PlanError, ScheduleError))
        return next((plan for plan, _ in tried), None)

    def succeeds(self, changed: PlanRequest) -> bool:
        """Taken for a no where finding out would take long."""
        return self.within(LIMIT_S) and self.plan(changed) is not None

    def within(self, seconds: float) -> bool:
        return time.monotonic() - self.begin_s < seconds

    @property
    def in_line(self) -> bool:
        """Whether each rank has one stage."""
        return registry.entry(self.request.options.named_schedule).place == "line"

    def memory(self, error: InfeasibleError) -> Iterator[str]:
        """The least memory of each device: of what the search found, or else of a plan made without caps.

        Unequal devices get as much as that asks for only where it does not do to leave none of them with
        less than some size.
        """
        cluster = self.request.cluster
        caps = [device.memory_bytes for device in cluster.devices[: self.request.options.devices]]
        alike = len(set(caps)) == 1
        least: list[float] = [cap * error.share for cap in caps] if isinstance(error, NoCutFits) else []
        if not any(least):
            free = self.plan(replace(self.request, cluster=_with_memory(cluster, [1 << 60] * len(caps))))
            peaks = () if free is None else free.peaks
            least = [max(pair) for pair in zip(caps, peaks, strict=False)]
            least = [max(least, default=0)] * len(least) if alike else least

        def scaled(margin: float) -> Cluster:
            return _with_memory(cluster, [ceil(size * margin) for size in least])

        def filled(size: float) -> Cluster:
            return _with_memory(cluster, [ceil(size)] * len(caps))

        def fits(changed: Cluster, by: PlanRequest = self.request) -> bool:
            return self.succeeds(replace(by, cluster=changed))

        def bisect(
            at: Callable[[float], Cluster],
            low: float,
            high: float,
            best: Cluster,
            by: PlanRequest = self.request,
        ) -> Cluster:
            """The cluster of nearly the smallest number that does; `best`, that of `high`, if no other."""
            while high > low * TOLERANCE and self.within(REFINED_S):
                middle = sqrt(low * high)
                if fits(changed := at(middle), by):
                    best, high = changed, middle
                else:
                    low = middle
            return best

        def least_margin() -> float | None:
            if not isinstance(error, NoCutFits) or self.in_line:
                return next((margin for margin in MARGINS if fits(scaled(margin))), None)
            # What stages need together is far above the estimate, and a search that barely fails takes long.
            found = None
            for margin in reversed(MARGINS):
                if (found is not None and not self.within(REFINED_S)) or not fits(scaled(margin)):
                    break
                found = margin
            return found

        margin = least_margin() if least else None
        if margin is None:
            return
        enough = scaled(margin)
        if margin > REFINED_MARGIN:
            before = max(smaller for smaller in MARGINS if smaller < margin)
            enough = bisect(scaled, before, margin, enough)
        if not alike:
            most = max(device.memory_bytes for device in enough.devices[: len(caps)])
            enough = bisect(filled, min(caps), most, enough)
        elif chooses(self.asked.options):  # other schedules may hold less
            limit_s = min(TRIED_S, self.asked.options.time_limit or TRIED_S)
            quickly = replace(self.asked, watch=None).changed(time_limit=limit_s)
            enough = bisect(filled, caps[0], enough.devices[0].memory_bytes, enough, quickly)
        yield _memory_sentence(enough, cluster, self.request.options.devices)

    def stages(self, error: InfeasibleError) -> Iterator[str]:
        request, searched = self.request, isinstance(error, NoCutFits)
        if any(device != request.cluster.devices[0] for device in request.cluster.devices):
            return
        guesses = [] if searched else [request.options.ranks + more for more in MORE_STAGES]
        if isinstance(error, NoCutFits) and error.stages:
            guesses = [error.stages, error.stages + 1]
        for stages in guesses:
            devices = _as_many(request, stages * request.options.replicas)
            wider = replace(request.changed(ranks=stages), cluster=replace(request.cluster, devices=devices))
            if self.succeeds(wider):
                yield _stages_sentence(request, stages)
                return

    def freeing(self) -> Iterator[str]:
        request, options = self.request, self.request.options
        optimises = planner(options.planner).optimises
        if optimises == "never":
            if self.succeeds(request.changed(planner=FREEING_PLANNER)):
                yield f"use planner {FREEING_PLANNER}, which frees memory"
            return
        linked = all(device.host_link is not None for device in request.cluster.devices)
        usual = () if optimises == "asked" else ("recompute", "offload")
        allowed = usual if options.allowed is None else options.allowed
        # Of large graphs the fast one is asked: what it finds, the slow one finds too.
        small = len(self.model.graph.ops) <= SMALL_GRAPH
        name = options.planner if small else FREEING_PLANNER
        for treatments, sentence in TREATMENT_ADVICE.items():
            if not set(treatments) > set(allowed) or ("offload" in treatments and not linked):
                continue
            if self.succeeds(request.changed(treatments=treatments, planner=name)):
                yield sentence
                return


def _with_memory(cluster: Cluster, sizes: list[int]) -> Cluster:
    """The cluster with at least these sizes, of the first devices, as they would be typed."""
    pairs = zip(cluster.devices, map(parse_bytes, map(enough_bytes, sizes)), strict=False)
    return cluster.with_memory([min(MOST_BYTES, max(device.memory_bytes, size)) for device, size in pairs])


def _memory_sentence(enough: Cluster, cluster: Cluster, stages: int) -> str:
    """What the devices of a cluster need to have as much as is enough. Those that have it are not named.

    >>> from pipeloom.clusters.names import find_cluster
    >>> two, three = find_cluster("2 x a100-40"), find_cluster("a100-40 with 3GiB + 2 x v100-32 with 1GiB")
    >>> _memory_sentence(_with_memory(two, 2 * [50 << 30]), two, 2)
    'give each device at least 50.0 GiB'
    >>> _memory_sentence(_with_memory(three, [4 << 30, 2 << 30, 2 << 30]), three, 3)
    'give a100-40-sxm at least 4.00 GiB and v100-32-sxm at least 2.00 GiB'
    >>> _memory_sentence(_with_memory(three, [3 << 30, 2 << 30, 2 << 30]), three, 3)
    'give v100-32-sxm at least 2.00 GiB'
    """
    more = {
        rank: (device.name, enough_bytes(device.memory_bytes))
        for rank, (device, before) in enumerate(zip(enough.devices[:stages], cluster.devices, strict=False))
        if device.memory_bytes > before.memory_bytes
    }
    sizes = list(dict.fromkeys(more.values()))
    if len(more) == stages and len({size for _, size in sizes}) == 1:
        return f"give each device at least {sizes[0][1]}"
    unchanged = {device.name for rank, device in enumerate(cluster.devices[:stages]) if rank not in more}
    if len({name for name, _ in sizes}) < len(sizes) or unchanged & {name for name, _ in sizes}:
        sizes = [(f"device {rank}", size) for rank, (_, size) in more.items()]  # of one name, and different
    return "give " + " and ".join(f"{name} at least {size}" for name, size in sizes)


def _as_many(request: PlanRequest, stages: int) -> tuple[Device, ...]:
    """At least so many devices like those of a cluster; of this machine's, each then has a smaller share."""
    devices = request.cluster.devices
    if not request.local:
        return devices + devices[:1] * (stages - len(devices))
    first = devices[0]
    disk = first.host_memory_bytes * len(devices) // stages
    memory = first.memory_bytes if request.capped else first.memory_bytes * len(devices) // stages
    return (replace(first, memory_bytes=max(1, memory), host_memory_bytes=disk),) * stages


def _stages_sentence(request: PlanRequest, stages: int) -> str:
    """The advice to use more stages, in ranks where the schedule puts several on each. Processes of this
    machine are there; other devices may have to be found."""
    line = registry.entry(request.options.named_schedule).place == "line"
    flag = f" (--ranks {stages})" if request.local or not line else ""
    devices = stages * request.options.replicas
    there = request.local or devices <= len(request.cluster.devices)
    return f"use {stages} {'stages' if line else 'ranks'}{flag}{'' if there else f' on {devices} devices'}"
