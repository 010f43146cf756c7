"""Width, depth and micro-batches chosen for a cluster and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from .ir.cluster import Cluster, Link
from .ir.errors import ConfigError, InfeasibleError, PipeloomError, PlanError
from .ir.memory_policy import TREATMENTS, Treatment
from .ir.plan import Plan
from .ir.weight_policies import FLUSH, WEIGHT_POLICIES
from .plan_request import CapturedModel, PlanRequest, fitting
from .planner.microbatch_sizes import ProfiledModel, interpolate_sample
from .planner.planners import first_way, planner
from .planner.shape_search import (
    PipelineShape,
    RankedShape,
    ShapeRequest,
    block_costs,
    even_costs,
    rank_shapes,
    refuse_unlike_devices,
    throughput,
)
from .planning import CapturableSizes, ModelAt, captured_model
from .schedules import registry

if TYPE_CHECKING:
    from .tracer.job import Job

SAMPLED = (2, 8, 4, 3, 16, 6, 12)
"""Rows of the micro-batches that the model is captured with, the first two of them at which it can be."""

CLOSED_FORMS = {("1f1b", FLUSH): "flush", ("1f1b", "2bw"): "2bw", ("gpipe", FLUSH): "gpipe"}
"""(schedule, weights) -> the name of its closed form."""


def shape_request(request: PlanRequest, job: Job) -> ShapeRequest:
    """What the formulas of `planner/shape_search.py` are asked. request: its `ranks` and `microbatches` do
    not matter.  job: captured at two sizes of micro-batches."""
    options, batch = request.options, _refuse_unshaped(request)
    asked = options.named_schedule, options.weights or registry.entry(options.named_schedule).weights
    if asked not in CLOSED_FORMS:
        known = ", ".join(f"{name} with {policy}" for name, policy in CLOSED_FORMS)
        raise PlanError(
            f"there is no closed form of schedule {asked[0]} with weights {asked[1]}",
            hint=f"use {known}; or leave out --closed-form, and plans are simulated",
        )
    recomputes = options.allowed is None or "recompute" in options.allowed
    if not recomputes and "offload" in (options.allowed or ()):
        raise PlanError(
            "the closed form does not know of offloading",
            hint="use --treatments recompute or none, or leave out --closed-form",
        )
    first, second = _sampled_models(_model_at(request, job))
    return ShapeRequest(
        costs=block_costs(first, second, request.cluster),
        cluster=request.cluster,
        global_batch=batch,
        pipelining=CLOSED_FORMS[asked],
        optimizer_bytes=first.graph.state_ratio,
        recompute=(False, True) if recomputes else (False,),
    )


def _refuse_unshaped(request: PlanRequest) -> int:
    batch = request.options.global_batch
    if request.local or batch is None:
        lacks = "--cluster" if request.local else "--global-batch"
        raise ConfigError(
            f"--ranks auto without {lacks}",
            hint="say for which devices and how many rows per step, as in --cluster '8 x v100-16' "
            "--global-batch 256",
        )
    refuse_unlike_devices(request.cluster)
    return batch


def _model_at(request: PlanRequest, job: Job) -> Callable[[int], CapturedModel]:
    masters = request.options.master_weights
    return partial(captured_model, job, cluster=request.cluster, master_weights=masters)


def _sampled_models(model_at: ModelAt) -> tuple[ProfiledModel, ProfiledModel]:
    models = list(islice(CapturableSizes(SAMPLED, model_at).models(SAMPLED), 2))
    if len(models) < 2:
        raise PlanError(
            f"the model can be captured at fewer than two of {', '.join(map(str, SAMPLED))} rows",
            hint="choose the shape by hand: --ranks N --microbatch-size ROWS",
        )
    return models[0], models[1]


SIMULATED, FEWEST, SMALL = 12, 2, 800
"""Shapes that are planned and simulated at most; of a model of more than so many ops fewer in proportion,
but these."""

SLACK = 1.25
"""Shapes that seem to need up to this share of the devices' memory are tried: cuts may balance it better."""

OF_SHAPES = "exact"
"""The planner that plans each shape where the joint search was asked for, which takes longer."""

FREEING = "vpipe"
"""The planner that recomputes where the one that was asked for does not by itself."""


@dataclass(frozen=True, kw_only=True)
class ShapedPlan:
    """rows_per_s: in the simulated step.  simulated: shapes that were looked at before it was chosen."""

    shape: PipelineShape
    plan: Plan
    rows_per_s: float
    simulated: int = 1


def plan_shape(request: PlanRequest, job: Job) -> tuple[ShapedPlan, CapturedModel]:
    """The fastest of the shapes that are simulated, and the model captured at its micro-batches.

    request: its `ranks` and `microbatches` do not matter.
    Shapes are looked at in the order of what a cut into equal parts would reach, transfers not hidden, but
    for those that would be no faster than the best so far if transfers took no time; at most `SIMULATED`
    that fit, fewer of a large model. Sizes of micro-batches are interpolated between two at which the model
    was captured; at the chosen one it is captured, and planned again.
    """
    batch = _refuse_unshaped(request)
    if registry.entry(request.options.named_schedule).place != "line":
        raise PlanError(
            f"no shape is chosen for {request.options.named_schedule}, which puts several stages on a rank",
            hint="use a schedule with one stage on each, such as 1f1b; or choose --ranks by hand",
        )
    model_at = cache(_model_at(request, job))
    request = replace(request, options=first_way(request.options, OF_SHAPES))
    search = _ShapeSearch(request, batch, *_sampled_models(model_at))
    found = sorted(search.plans(), key=lambda shaped: -shaped.rows_per_s)
    for shaped in found:
        model = model_at(shaped.shape.microbatch_size)
        again = search.plan_of(shaped.shape, model)
        if again is not None:
            return replace(again, simulated=search.simulated), model
    first = search.refusals[0].message if search.refusals else ""
    raise InfeasibleError(
        f"none of the {search.simulated} shapes that were tried fits; of the first: {first}",
        hint="use more devices, or devices with more memory; or let residuals be recomputed",
    )


class _ShapeSearch:
    def __init__(self, request: PlanRequest, batch: int, first: ProfiledModel, second: ProfiledModel) -> None:
        self.request, self.batch, self.first, self.second = request, batch, first, second
        weights = request.options.weights or registry.entry(request.options.named_schedule).weights
        self.ideal = ShapeRequest(
            costs=even_costs(first, second, request.cluster),
            cluster=request.cluster,
            global_batch=self.batch,
            pipelining="flush" if WEIGHT_POLICIES[weights].flushes else "2bw",
            optimizer_bytes=first.graph.state_ratio,
        )
        self.bound = replace(self.ideal, cluster=_with_free_links(request.cluster))
        self.simulated = 0
        self.refusals: list[PipeloomError] = []

    def plans(self) -> Iterator[ShapedPlan]:
        best, planned = 0.0, 0
        most = max(FEWEST, min(SIMULATED, SIMULATED * SMALL // len(self.first.graph.ops)))
        failed: set[PipelineShape] = set()
        for shape, _, _ in self._in_order():
            if planned == most or (planned and self.simulated >= 2 * most):
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
                best, planned = max(best, shaped.rows_per_s), planned + 1
                yield shaped

    def _in_order(self) -> list[RankedShape]:
        """Shapes by what they reach at best, each once: whether to recompute is the planner's choice."""
        ranked = rank_shapes(self.ideal, slack=SLACK)
        once: dict[PipelineShape, RankedShape] = {}
        for one in ranked:
            once.setdefault(replace(one.shape, recompute=False), one)
        return [one._replace(shape=shape) for shape, one in once.items()]

    def plan_of(self, shape: PipelineShape, model: ProfiledModel) -> ShapedPlan | None:
        """The plan of one of its pipelines, with everything kept if that fits; None if none fits."""
        options, cluster = self.request.options, self.request.cluster
        treatments = TREATMENTS["recompute"] if options.allowed is None else options.allowed
        optimises = planner(options.planner).optimises
        ways: list[tuple[str, tuple[Treatment, ...]]] = [(options.planner, ())]
        if treatments and optimises != "never":
            ways.append((options.planner if optimises == "always" else FREEING, treatments))
        devices = replace(cluster, devices=cluster.devices[: shape.width * shape.depth])

        def planned(way: tuple[str, tuple[Treatment, ...]]) -> Plan:
            by, treated = way
            sizes = {"ranks": shape.depth, "replicas": shape.width}
            one = self.request.changed(**sizes, planner=by, treatments=treated)
            return replace(one, cluster=devices).plan(model, explained=False)

        made = next((plan for plan, _ in fitting(ways, planned, refusals=self.refusals)), None)
        if made is None:
            return None
        recomputes = any(stage.recomputed_bytes for stage in made.stages)
        rate = self.batch / made.predicted_step_s if made.predicted_step_s else inf
        return ShapedPlan(shape=replace(shape, recompute=recomputes), plan=made, rows_per_s=rate)


def _with_free_links(cluster: Cluster) -> Cluster:
    free = Link(bandwidth_bytes_per_s=inf)
    devices = tuple(replace(device, group=None) for device in cluster.devices)
    return replace(cluster, devices=devices, within_node=free, between_nodes=None, groups={}, node_link=None)


def _asks_more(shape: PipelineShape, failed: PipelineShape, batch: int) -> bool:
    return (
        shape.depth == failed.depth
        and shape.microbatch_size >= failed.microbatch_size
        and shape.microbatches(batch) >= failed.microbatches(batch)
    )
