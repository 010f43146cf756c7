"""The passes before training, joined: capture, profile, plan, simulate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .batch_sizes import best_plan, largest_below, largest_plan
from .caches import beside_ranks, kept_profile
from .clusters.names import cpu_cluster, find_cluster
from .compiled_profiles import compiled_profile
from .ir.cluster import Cluster
from .ir.errors import CaptureError, PlanError
from .ir.memory_policy import TREATMENTS
from .ir.plan import Plan
from .ir.profile import Profile
from .ir.units import parse_bytes
from .kernel_compilation import kernels_compiled_beside
from .machine import with_files
from .passes import capture, estimate, profile, with_updates
from .plan_advice import plan_with_advice
from .plan_request import CapturedModel, PlanRequest
from .planner.microbatch_sizes import ProfiledModel, shared_rows
from .planner.registry import planner
from .planner.request import PlanOptions
from .planner.search_watch import SearchWatch
from .schedules.chunks import with_chunks
from .settings import PlanSettings
from .tracer.job import Job

if TYPE_CHECKING:
    from torch import Tensor

    from .tracer.captured import Captured


def plan(
    job: Job,
    settings: PlanSettings | None = None,
    *,
    captured: Captured | None = None,
    profiled: Profile | None = None,
    **changes: Any,
) -> Plan:
    """The plan for a job on this machine, or on a cluster described by figures.

    job: the model, its batches and its optimizer.
    settings: `PlanSettings`, by default those of `pipeloom plan`.  changes: of its fields, as ranks=4 or
    memory="16GiB", which wins over the memory of a cluster; without either the plan has no caps.
    captured, profiled: results of `capture` and `profile`, if they are at hand.

    Raises: CaptureError and CutError as `capture`; ConfigError for a setting or batch that cannot be;
    ScheduleError for a schedule that is unknown or cannot be built for these stages; PlanError, also for a
    compiled plan with costs by roofline or with a profile of eager ops; InfeasibleError if nothing fits under
    the caps, with what would.
    Source: of the cut, that of the planner ("exact" is dynamic programming), see `Planner` in
    `planner/registry.py`; of times on a cluster, the roofline model, see `profiler/roofline.py`.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> plan = pipeloom.plan(job, ranks=2, microbatches=4, microbatch_size=4, cluster="2 x a100-40")
    >>> print(plan.as_schedule)
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    With a schedule that puts two stages on each, two devices run four stages:

    >>> plan = pipeloom.plan(job, ranks=2, schedule="zb_v", microbatch_size=4, cluster="2 x a100-40")
    >>> len(plan.stages), plan.placement
    (4, (0, 1, 1, 0))
    """
    return plan_size(make_request(job, settings, **changes), job, captured=captured, profiled=profiled)[0]


def make_request(
    job: Job, settings: PlanSettings | None = None, *, watch: SearchWatch | None = None, **changes: Any
) -> PlanRequest:
    """What settings mean for a job on this machine; see `plan`. watch: told how the search goes on.

    Raises: as `plan`, for what is wrong whatever the model is.
    """
    settings = (settings or PlanSettings()).changed(**changes)
    treatments, optimises = settings.allowed, planner(settings.planner).optimises
    if settings.offload_dir is not None and treatments is None and optimises != "never":
        treatments = TREATMENTS["both"]
    given = {one.name: getattr(settings, one.name) for one in fields(PlanSettings)}
    options = PlanOptions(**given)
    schedule = with_chunks(settings.schedule, settings.chunks)
    return PlanRequest(
        options=replace(options, treatments=treatments, schedule=schedule, chunks=None),
        cluster=_devices(settings),
        capped=settings.cluster is not None or settings.memory is not None,
        local=settings.cluster is None,
        watch=watch,
    )


def _devices(settings: PlanSettings) -> Cluster:
    """The devices to plan for: those of a cluster, or processes of this machine.

    Raises: ConfigError if there is no such cluster, or the folder to offload to takes no file.
    """
    cluster, memory = settings.cluster, settings.memory
    if cluster is None:
        cluster = cpu_cluster(settings.devices, memory=memory)
    elif not isinstance(cluster, Cluster):
        cluster = find_cluster(str(cluster))
    if settings.cluster is not None and memory is not None:
        size = parse_bytes(memory)
        cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=size) for d in cluster.devices))
    return cluster if settings.offload_dir is None else with_files(cluster, Path(settings.offload_dir))[0]


def plan_size(
    request: PlanRequest,
    job: Job,
    *,
    captured: Captured | None = None,
    profiled: Profile | None = None,
) -> tuple[Plan, CapturedModel]:
    """The plan for the micro-batch size of the request, and the model at it.

    Raises: InfeasibleError that says which size would fit, if finding out does not take long.
    """
    begin = time.monotonic()
    model = _model_for(request, job, request.options.microbatch_size, captured=captured, profiled=profiled)
    took_s = time.monotonic() - begin
    own = captured is None and profiled is None
    quick = own and took_s < QUICK_S and not request.options.compile  # each size would be compiled

    def largest() -> int | None:
        return largest_below(request, model, partial(_model_if_batch, request, job)) if quick else None

    return plan_with_advice(request, model, largest), model


def plan_largest(request: PlanRequest, job: Job) -> tuple[Plan, ProfiledModel]:
    """The plan with the largest micro-batches that fit, sought around those of the request; see
    `largest_plan`."""
    try:
        return largest_plan(request, partial(_model_if_batch, request, job))
    except _NoBatch as error:
        assert error.__cause__ is not None, "it was raised from what Job.batch raised"
        raise error.__cause__ from None


def plan_best(request: PlanRequest, job: Job) -> tuple[Plan, ProfiledModel]:
    """The plan with the fastest step over all micro-batch sizes; see `best_plan`."""
    return best_plan(request, partial(_model_if_batch, request, job))


class _NoBatch(CaptureError):
    """`Job.batch` failed; the cause says why."""


def _model_if_batch(request: PlanRequest, job: Job, size: int) -> ProfiledModel:
    """The model at a size that the user may not have asked for. Raises: CaptureError also where the job has
    no batch of that size, whatever it says then."""
    from .tracer.job_calls import sample_batch

    try:
        batch = sample_batch(job, 0, size)
    except Exception as error:  # the user's code, which need not be good for this size
        raise _NoBatch(f"{job.name} has no batch of {size} rows") from error
    return _model_for(request, job, size, batch=batch)


def _model_for(
    request: PlanRequest,
    job: Job,
    size: int,
    *,
    captured: Captured | None = None,
    profiled: Profile | None = None,
    batch: Mapping[str, Tensor] | None = None,
) -> CapturedModel:
    """The model that a search follows on. What is measured here has the machine to itself."""
    model_for = partial(
        captured_model, job, size, profiled=profiled, batch=batch, compiled=request.options.compile
    )
    if not request.local and captured is None:
        with kernels_compiled_beside(request.options.planner, request.options.allowed) as wait_for_code:
            model = model_for(request.cluster)
            wait_for_code(model.graph)
        return model
    model = model_for(None if request.local else request.cluster, captured=captured)
    if not request.local:
        return model
    beside = {
        n: beside_ranks(each, model.graph, request.options.devices) for n, each in model.profiles.items()
    }
    return replace(model, profiles=beside)


QUICK_S = 15.0
"""Seconds of capturing and profiling up to which another size is looked at to say which one would fit."""


def captured_model(
    job: Job,
    size: int,
    cluster: Cluster | None,
    *,
    captured: Captured | None = None,
    profiled: Profile | None = None,
    batch: Mapping[str, Tensor] | None = None,
    compiled: bool = False,
) -> CapturedModel:
    """A job captured at one micro-batch size, and its costs: by roofline on a cluster, or measured here
    within the last day.

    batch: one of that size, if it is at hand.  compiled: costs of compiled functions are wanted.
    Raises: PlanError if what is given is of another size, or is to stand for several kinds of devices; if
        compiled costs are wanted and those at hand are not.
    """
    if compiled:
        require_compiled(profiled, cluster)
    kinds = {d.name for d in cluster.devices} if cluster is not None else set()
    if profiled is not None and len(kinds) > 1:
        raise PlanError(
            f"one profile, of device {profiled.device}, for the kinds {', '.join(sorted(kinds))}",
            hint="leave the profile out, and each kind is estimated from its figures",
        )
    devices = kinds or ({profiled.device} if profiled is not None else set())
    if captured is not None:
        graph = with_updates(captured.graph, job, devices)
    else:
        captured = capture(job, size, batch=batch, devices=devices)
        graph = captured.graph
    if (rows := shared_rows(captured.graph)) not in (None, size):
        raise PlanError(
            f"the captured model has micro-batches of {rows} rows, the plan is for {size}",
            hint=f"capture it with {size} rows, or plan for {rows}",
        )
    if profiled is None and cluster is not None:
        return CapturedModel(size=size, graph=graph, profiles=estimate(graph, cluster), captured=captured)
    measured = profiled or kept_profile(captured, profile)
    if compiled and profiled is None:
        measured = compiled_profile(captured, measured)
    names = {"cpu", measured.device, *kinds}
    profiles = dict.fromkeys(sorted(names), measured)
    return CapturedModel(size=size, graph=graph, profiles=profiles, captured=captured)


def require_compiled(profiled: Profile | None, cluster: Cluster | None) -> None:
    """Raises: PlanError for costs of eager ops: by roofline, which knows no others, or in a profile."""
    if profiled is None and cluster is not None:
        raise PlanError(
            "a cluster that is described by figures has times by roofline, which are of eager ops; compiled "
            "ones are only known where they can be measured",
            hint="plan for it without compiling, or with a profile that was measured there with --compile",
        )
    if profiled is not None and not profiled.compiled:
        raise PlanError(
            "the profile is of eager ops, the plan is to be for compiled stages",
            hint="make one with pipeloom profile --compile",
        )
