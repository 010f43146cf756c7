"""A shape chosen by simulating: a plan, with stages cut by op, for each shape that may be the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf

from .. import schedules
from ..ir.cluster import Cluster, Link
from ..ir.errors import InfeasibleError, PlanError, ScheduleError
from ..ir.memory_policy import Treatment
from ..ir.plan import Plan
from ..ir.weight_policy import WEIGHT_POLICIES
from ..planner import (
    ProfiledModel,
    RankedShape,
    Shape,
    ShapeRequest,
    WideLinks,
    even_costs,
    interpolate_sample,
    planner,
    rank_shapes,
    throughput,
    wide_links,
)
from ..tracer import Job
from .passes import captured_model
from .plan_request import CapturedModel, PlanRequest
from .shape_search import refuse_unshaped, sampled_models

SIMULATED = 12
"""Shapes that are planned and simulated at most."""

SLACK = 1.25
"""Shapes that seem to need up to this share of the devices' memory are tried: cuts may balance it better."""

FREEING = "vpipe"
"""The planner that recomputes where the one that was asked for does not by itself."""


@dataclass(frozen=True, kw_only=True)
class ShapedPlan:
    """A shape with the plan of one of its pipelines, on every `width`-th device.

    step_s: of all pipelines, with the sum of gradients over replicas.  exchange_s: seconds of that sum.
    simulated: shapes that were looked at before it was chosen.
    """

    shape: Shape
    plan: Plan
    step_s: float
    exchange_s: float
    rows_per_s: float
    simulated: int = 1


def plan_shape(request: PlanRequest, job: Job) -> tuple[ShapedPlan, CapturedModel]:
    """The fastest of the shapes that are simulated, and the model captured at its micro-batches.

    request: `stages` and `microbatches` do not matter.
    Shapes are looked at in the order of what a cut into equal parts would reach, transfers not hidden, but
    for those that would be no faster than the best so far if transfers took no time; at most `SIMULATED`
    that fit. Sizes of micro-batches are interpolated between two at which the model was captured; at the
    chosen one it is captured, and planned again.
    Raises: ConfigError, PlanError if shapes cannot be chosen for the request; InfeasibleError if nothing
        fits; CaptureError.
    """
    refuse_unshaped(request)
    if schedules.entry(request.schedule).place != "line":
        raise PlanError(
            f"no shape is chosen for schedule {request.schedule}, which puts several stages on a rank",
            hint="use a schedule with one stage on each, such as 1f1b; or choose --stages by hand",
        )
    model_at = cache(lambda size: captured_model(job, size, request.cluster))
    search = _ShapeSearch(request, *sampled_models(model_at))
    found = sorted(search.plans(), key=lambda shaped: shaped.step_s)
    for shaped in found:
        model = model_at(shaped.shape.microbatch_size)
        again = search.plan_of(shaped.shape, model)
        if again is not None:
            return replace(again, simulated=search.simulated), model
    raise InfeasibleError(
        f"none of the {search.simulated} shapes that were simulated fits",
        hint="use more devices, or devices with more memory; or let residuals be recomputed",
    )


class _ShapeSearch:
    def __init__(self, request: PlanRequest, first: ProfiledModel, second: ProfiledModel) -> None:
        assert request.global_batch is not None, "see refuse_unshaped"
        self.request, self.first, self.second = request, first, second
        self.batch = request.global_batch
        weights = request.options.weights or schedules.entry(request.schedule).weights
        self.flushes = WEIGHT_POLICIES[weights].flushes
        self.links: WideLinks = wide_links(request.cluster)
        self.ideal = ShapeRequest(
            costs=even_costs(first, second, request.cluster),
            cluster=request.cluster,
            global_batch=self.batch,
            pipelining="flush" if self.flushes else "2bw",
            optimizer_bytes=request.options.optimizer_bytes,
        )
        self.bound = replace(self.ideal, cluster=_with_free_links(request.cluster))
        self.simulated = 0

    def plans(self) -> Iterator[ShapedPlan]:
        """Those of the shapes that are worth a look, as far as they have one."""
        best = 0.0
        failed: set[Shape] = set()
        for shape, _, _ in self._in_order():
            if self.simulated == SIMULATED:
                return
            bound = throughput(self.bound, shape)
            if bound <= best or any(_asks_more(shape, other, self.batch) for other in failed):
                continue
            self.simulated += 1
            model = interpolate_sample(self.first, self.second, shape.microbatch_size)
            shaped = self.plan_of(shape, model)
            if shaped is None:
                failed.add(shape)
            else:
                best = max(best, shaped.rows_per_s)
                yield shaped

    def _in_order(self) -> list[RankedShape]:
        """Shapes by what they reach at best, each once: whether to recompute is the planner's choice."""
        ranked = rank_shapes(self.ideal, slack=SLACK)
        once: dict[Shape, RankedShape] = {}
        for one in ranked:
            once.setdefault(replace(one.shape, recompute=False), one)
        return [one._replace(shape=shape) for shape, one in once.items()]

    def plan_of(self, shape: Shape, model: ProfiledModel) -> ShapedPlan | None:
        """The plan of one of its pipelines, with everything kept if that fits; None if none fits."""
        options, strategy = self.request.options, self.request.strategy
        treatments: tuple[Treatment, ...] = ("recompute",)
        if options.treatments is not None:
            treatments = options.treatments
        asked = planner(strategy)
        ways: list[tuple[str, tuple[Treatment, ...]]] = [(strategy, ())]
        if treatments and asked.optimises != "never":
            ways.append((strategy if asked.optimises == "always" else FREEING, treatments))
        for by, treated in ways:
            one = replace(
                self.request,
                stages=shape.depth,
                microbatches=shape.microbatches(self.batch),
                global_batch=None,
                cluster=self._one_pipeline(shape),
                strategy=by,
                options=replace(options, treatments=treated),
            )
            try:
                plan = one.plan(model, explained=False)
            except (InfeasibleError, ScheduleError):  # the second: too few micro-batches for the schedule
                continue
            return self._shaped(shape, plan)
        return None

    def _one_pipeline(self, shape: Shape) -> Cluster:
        """The devices of the first pipeline. The network link of a node is divided among its pipelines;
        without a flush, a second set of gradients is there while the first is summed over replicas."""
        cluster, width = self.request.cluster, shape.width
        devices = cluster.devices[: width * shape.depth : width]
        shared = cluster.node_link
        if shared is not None:
            nodes = [device.node for device in cluster.devices]
            flows = min(width, max(nodes.count(node) for node in set(nodes)))
            shared = replace(shared, bandwidth_bytes_per_s=shared.bandwidth_bytes_per_s / flows)
        if width > 1 and not self.flushes:
            trained = sum(p.bytes for p in self.first.graph.parameters if p.trainable)
            extra = ceil(trained / shape.depth)
            devices = tuple(replace(d, memory_bytes=max(1, d.memory_bytes - extra)) for d in devices)
        return replace(cluster, devices=devices, node_link=shared)

    def _shaped(self, shape: Shape, plan: Plan) -> ShapedPlan:
        """Source of how the sum is combined with the step: PipeDream-2BW, section 3.4."""
        size = max(stage.memory.gradients for stage in plan.stages)
        latency_s, s_per_byte = (table[shape.width, shape.depth] for table in self.links.around)
        exchange_s = float(2 * (shape.width - 1) * (latency_s + size / shape.width * s_per_byte))
        step_s = plan.predicted_step_s
        step_s = step_s + exchange_s if self.flushes else max(step_s, exchange_s)
        recomputed = any(stage.recomputed_bytes for stage in plan.stages)
        return ShapedPlan(
            shape=replace(shape, recompute=recomputed),
            plan=plan,
            step_s=step_s,
            exchange_s=exchange_s,
            rows_per_s=self.batch / step_s if step_s else inf,
        )


def _with_free_links(cluster: Cluster) -> Cluster:
    free = Link(bandwidth_bytes_per_s=inf)
    devices = tuple(replace(device, group=None) for device in cluster.devices)
    return replace(cluster, devices=devices, within_node=free, between_nodes=None, groups={}, node_link=None)


def _asks_more(shape: Shape, failed: Shape, batch: int) -> bool:
    """Whether a shape holds at least as much as one of which no plan fits."""
    return (
        shape.depth == failed.depth
        and shape.microbatch_size >= failed.microbatch_size
        and shape.microbatches(batch) >= failed.microbatches(batch)
    )
