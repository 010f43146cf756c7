"""The passes before training: capture, profile, plan, for one micro-batch size or the best, simulate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .caches import beside_ranks, kept_plan, kept_profile
from .clusters.names import cpu_cluster
from .compiled_profiles import compiled_profile
from .ir.cluster import Cluster, Device, is_cpu
from .ir.errors import CaptureError, ConfigError, PlanError, ScheduleError
from .ir.graph import OpGraph
from .ir.memory_policy import TREATMENTS
from .ir.plan import Plan
from .ir.profile import OpCost, Profile, batch_text
from .ir.text import parse_bytes
from .ir.timeline import Timeline
from .kernel_compilation import kernels_compiled_beside
from .machine import with_files
from .plan_advice import plan_with_advice
from .plan_request import COMPILED, CapturedModel, PlanRequest, fastest, fitting
from .plan_settings import SHAPE, PlanSettings
from .plan_split_words import best_words, in_parts
from .planner.microbatch_sizes import ProfiledModel, interpolate_sample, largest_size, shared_rows
from .planner.plan_costs import PlanCosts, with_planned_state
from .planner.planners import chooses, planner, searches
from .planner.request import PlanOptions, SearchWatch
from .profiler.roofline import roofline
from .schedules import registry
from .schedules.language.names import parse_name
from .schedules.registry import with_chunks

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from .tracer.captured import Captured
    from .tracer.job import Job

_log = logging.getLogger("pipeloom")


def capture(
    job: Job,
    microbatch_size: int,
    *,
    batch: Mapping[str, Tensor] | None = None,
    autocast: dtype | None = None,
    device: str = "cpu",
    devices: Iterable[str] = (),
    master_weights: bool = False,
    split: Mapping[str, int] | None = None,
) -> Captured:
    """Turn a job's model and loss into an OpGraph and what can be run; see `tracer.capture`.

    job: its model is built on fake tensors, which take no memory.
    microbatch_size: rows per micro-batch.  batch: a micro-batch to take the shapes from instead, tensors
    whose first dimension is the micro-batch, by the names of the forward's arguments.
    autocast: torch.bfloat16 for mixed precision, as `torch.autocast` does it on `device`; None for none.
    devices: names of those that the job's optimizer is to run on, by default CPUs.  master_weights: it is to
    update float32 copies.  See `with_updates`.
    split: weights to cut by words, as a plan has them (`Plan.split_words`).
    A model that cannot be exported is captured as whole modules, with a warning that says why.

    Raises: CaptureError if the model can be captured in neither way, has nothing to train, or its loss is no
        scalar; CutError if `Job.modules` names what the model does not have; ConfigError for an `autocast`
        that cannot be trained with; PlanError if the job's optimizer cannot train it.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> graph = pipeloom.capture(job, 4).graph
    >>> [op.name for op in graph.ops][:3], [f"{p.name} {p.shape}" for p in graph.parameters][:2]
    (['linear', 'tanh', 'linear_1'], ['0.weight (8, 8)', '0.bias (8,)'])
    """
    from .run_options import mixed_precision
    from .runtime.optimizers import refuse_groups_by_identity
    from .tracer.capture import capture as trace
    from .tracer.example import given_to

    mixed = mixed_precision(autocast, device)
    captured = trace(job, microbatch_size, batch=batch, autocast=mixed, split=split)
    if job.optimizer is not None:
        refuse_groups_by_identity(job.optimizer, given_to(job) or captured.blueprint.model)
    return replace(captured, graph=with_updates(captured.graph, job, devices, master_weights))


def with_updates(
    graph: OpGraph, job: Job, devices: Iterable[str] = (), master_weights: bool = False
) -> OpGraph:
    """The graph with what the job's optimizer takes for each parameter.

    devices: names of those it is to run on, by default CPUs (`ir.cluster.is_cpu`). On others PyTorch's
    optimizers update many parameters at once.
    master_weights: it updates float32 copies of those of lower precision.
    """
    from .runtime.optimizers import stand_ins, update_bytes

    params = stand_ins(graph, master_weights)
    known = update_bytes(job.optimizer, params, not all(map(is_cpu, devices)), graph.rows)
    masters = [p.name for p in graph.parameters if p.name in params and params[p.name].nbytes != p.bytes]
    return graph.with_updates(known | {n: replace(known[n], master=params[n].nbytes) for n in masters})


def profile(captured: Captured, *, device: str = "cpu", compile: bool = False) -> Profile:
    """Measure every op of a captured model on this machine's `device` ("cpu", "cuda" or "auto"), whatever is
    kept of earlier measurements.

    captured: what `capture` gave; its micro-batch size is that of the costs.
    compile: the costs are those that ops have in stages that torch.compile made. How these compare with
        eager ones is compiled and measured once a day, see `compiled_profile`.
    Returns: of every op seconds, forward and backward apart, and bytes.
    Raises: ConfigError if this machine has no such device.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> measured = pipeloom.profile(pipeloom.capture(job, 4))
    >>> measured.source, measured.batch, measured.costs["linear"].forward_s > 0
    ('measured', ('input[4,8]float32',), True)
    """
    from .profiler.measure_modules import measure_modules  # only now: these import torch
    from .profiler.measure_ops import measure
    from .ranks import usable_device
    from .run_options import named_device
    from .runtime.allocator import keep_freed_memory

    usable_device(device := named_device(device))
    if device == "cpu":  # as in ranks: else large tensors take the time of mapping fresh pages
        keep_freed_memory(grown_for=max(value.bytes for op in captured.graph.ops for value in op.outputs))
    # By the thread's own time: what others take of the core, as ranks that start, is none of an op.
    if captured.graph.fallback:
        eager = measure_modules(captured, device=device)
    else:
        eager = measure(captured, device=device, clock=time.thread_time)
    return compiled_profile(captured, eager, device=device) if compile else eager


def estimate(graph: OpGraph, cluster: Cluster, *, captured: Captured | None = None) -> dict[str, Profile]:
    """Profiles by roofline for every kind of device of a cluster, which need not be there.

    captured: what the graph is of. Whole modules are run, on this machine's CPU, for the kernels in them.
    Raises: ConfigError for devices of one name that differ, and whole modules without what was captured.
    """
    kinds: dict[str, Device] = {}
    for device in cluster.devices:
        first = kinds.setdefault(device.name, device)
        rates = ("flops_per_s", "memory_bytes_per_s", "efficiency", "launch_s")  # what op times depend on
        if any(getattr(first, rate) != getattr(device, rate) for rate in rates):
            raise ConfigError(
                f"the cluster has devices named {device.name} that compute at different rates",
                hint="give each kind of device a name of its own",
            )
    if not graph.fallback:
        return {name: roofline(graph, device) for name, device in kinds.items()}
    if captured is None:
        raise ConfigError(
            f"the graph of {graph.name} is of whole modules, and does not say what they compute",
            hint="name the MODEL",
        )
    from .profiler.measure_modules import estimate_modules

    return {name: estimate_modules(captured, device) for name, device in kinds.items()}


def simulate(
    plan: Plan, graph: OpGraph, costs: Profile | Mapping[str, Profile], cluster: Cluster
) -> Timeline:
    """Predict a step of a plan from a profile. Needs neither torch nor the model.

    plan: its cut, schedule, memory policy and placement.
    graph: of the model that it was made for. What the optimizer takes is in it, for the `devices` that it was
        captured for; if it does not say so, it keeps what the plan says, and one copy of the largest
        parameter is scratch.
    costs: one profile for all devices, or by device name.
    cluster: at least one device per rank, in rank order, with their links.
    Returns: when what happens, in seconds from the start of the step, and bytes held.
    Raises: PlanError if plan, graph, profile and cluster do not belong together; CutError if the plan's
        stages are no cut of the graph; ScheduleError if its rows cannot be run.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> captured = pipeloom.capture(job, 4)
    >>> card = pipeloom.Device(name="card", memory_bytes=2**30)
    >>> link = pipeloom.Link(bandwidth_bytes_per_s=10e9, latency_s=1e-5)
    >>> cluster = pipeloom.Cluster(devices=(card, card), within_node=link)
    >>> costs = pipeloom.profile(captured)  # as if the cards were as fast as this machine
    >>> two = {"ranks": 2, "microbatch_size": 4, "cluster": "2 x a100-40", "captured": captured}
    >>> plan = pipeloom.plan(job, schedule="1f1b", **two)
    >>> predicted = pipeloom.simulate(plan, captured.graph, costs, cluster)
    >>> predicted.source, predicted.ranks, 0 < predicted.bubble < 1
    ('predicted', 2, True)
    """
    plan.stage_graph(graph)  # refuses a plan of another model
    profiles = [costs] if isinstance(costs, Profile) else list(costs.values())
    for profiled in profiles:
        if profiled.graph != plan.graph:
            raise PlanError(
                f"the profile was made for model {profiled.graph}, the plan for {plan.graph}",
                hint="profile the plan's model",
            )
        if profiled.batch and plan.batch and profiled.batch != plan.batch:
            raise PlanError(
                f"the profile is of micro-batches {', '.join(profiled.batch)}, the plan for "
                f"{', '.join(plan.batch)}",
                hint="profile with the plan's micro-batch size",
            )
    return PlanCosts(with_planned_state(graph, plan), costs, cluster).simulate(plan)


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
    Source: of the cut, that of the planner (auto is a search of this project), see `Planner` in
    `planner/planners.py`; of times on a cluster, the roofline model, see `profiler/roofline.py`.

    >>> import pipeloom, torch
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * seed)},
    ...     loss=lambda output, batch: output.square().mean(),
    ... )
    >>> two = {"ranks": 2, "cluster": "2 x a100-40", "microbatch_size": 4}
    >>> plan = pipeloom.plan(job, schedule="1f1b", microbatches=4, **two)
    >>> print(plan.as_schedule)
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    With a schedule that puts two stages on each, two devices run four stages:

    >>> plan = pipeloom.plan(job, schedule="zb_v", **two)
    >>> len(plan.stages), plan.placement
    (4, (0, 1, 1, 0))
    """
    return plan_size(make_request(settings, **changes), job, captured=captured, profiled=profiled)[0]


def refuse_names(settings: PlanSettings) -> None:
    """Refuse what no plan can be made by, which needs no model: `make_request` does it, too.

    Raises: PlanError for a planner, ScheduleError for a schedule that is unknown; ConfigError for a time
        limit of a planner that takes none.
    """
    registry.entry(settings.named_schedule)
    if not searches(settings.planner) and settings.time_limit is not None:
        raise ConfigError(
            f"a time limit of {settings.time_limit} s is given, and planner {settings.planner} takes none",
            hint="leave it out, or plan by auto",
        )


SIMPLER_WITHIN = 0.05
"""What forecasts of steps on a machine's own cores are off by: see `PlanOptions.simpler_within`."""


def make_request(
    settings: PlanSettings | None = None,
    *,
    watch: SearchWatch | None = None,
    any_width: bool = False,
    **changes: Any,
) -> PlanRequest:
    """What settings mean on this machine; see `plan`.

    watch: told how the search goes on.  any_width: `ranks` are those that were started, which may be shared
        out among replicas.
    """
    settings = (settings or PlanSettings()).changed(**changes)
    refuse_names(settings)
    treatments, optimises = settings.allowed, planner(settings.planner).optimises
    if settings.offload_dir is not None and treatments is None and optimises != "never":
        treatments = TREATMENTS["both"]
    options = PlanOptions(
        **{one.name: getattr(settings, one.name) for one in fields(PlanSettings)},
        simpler_within=SIMPLER_WITHIN if settings.cluster is None else 0.0,
        any_width=any_width or set(SHAPE) == settings.unsaid.keys(),
    )
    if settings.schedule is not None or not chooses(options):
        options = replace(
            options, schedule=with_chunks(settings.named_schedule, settings.chunks), chunks=None
        )
    return PlanRequest(
        options=replace(options, treatments=treatments),
        cluster=_devices(settings),
        capped=settings.cluster is not None or settings.memory is not None,
        local=settings.cluster is None,
        watch=watch,
    )


def _devices(settings: PlanSettings) -> Cluster:
    """The devices of a cluster, or processes of this machine."""
    cluster, memory = settings.described, settings.memory
    if cluster is None:
        cluster = cpu_cluster(settings.devices, memory=memory)
    elif memory is not None:
        cluster = cluster.with_memory([parse_bytes(memory)] * len(cluster.devices))
    return cluster if settings.offload_dir is None else with_files(cluster, Path(settings.offload_dir))[0]


def plan_size(
    request: PlanRequest,
    job: Job,
    *,
    captured: Captured | None = None,
    profiled: Profile | None = None,
    device: str | None = None,
) -> tuple[Plan, CapturedModel]:
    """The plan for the micro-batch size of the request, and the model at it. If nothing fits, the error says
    which size would, if finding out does not take long.

    device: of this machine, on which each of several sequence lengths is measured; None where it is planned
        without `captured` and `profiled`, too.
    """
    begin = time.monotonic()
    size, lengths = request.options.microbatch_size, request.options.lengths is not None
    if lengths and profiled is not None:
        raise ConfigError("lengths are given, and a profile, which is of one", hint="leave one of them out")
    of_lengths = partial(_model_of_lengths, request, job, size, device)
    if lengths:
        model = of_lengths(captured)
    else:
        model = _model_for(request, job, size, captured=captured, profiled=profiled)
    took_s = time.monotonic() - begin
    made_here = captured is None and profiled is None
    timed_here = made_here if captured is None else profiled is None or _device_here(profiled) is not None
    if request.options.word_parts is None and timed_here:
        in_words = of_lengths if lengths else partial(_split_model, request, job, model.size, profiled)
        until = request.until
        best = best_words(request, model, in_words)
        if best is not None:
            return best
        request = request.limited_to(until)
    # With compiling or several lengths, each size would take long.
    quick = made_here and took_s < QUICK_S and not request.options.compile and not lengths

    def largest() -> int | None:
        return largest_below(request, model, partial(_model_if_batch, request, job)) if quick else None

    return plan_with_advice(request, model, largest), model


def plan_here(
    job: Job, settings: PlanSettings, captured: Captured, *, device: str, any_width: bool = False
) -> Plan:
    """The plan for this machine's devices, as kept of the last day or made now.

    captured: for `device`, a type that torch knows; of several sequence lengths, of any.
    any_width: see `make_request`.
    """
    request = make_request(settings, any_width=any_width)
    options = request.options

    def make() -> Plan:
        timed_on = device if device != "cpu" or captured.autocast is not None else None
        if options.lengths is not None:
            return plan_size(request, job, captured=captured, device=timed_on)[0]
        parts, profiled = _measured(request, captured, timed_on)
        return plan_size(request, job, captured=parts, profiled=profiled)[0]

    tried = registry.names() if options.schedule is None else [parse_name(options.schedule).family]
    if not registry.LIBRARY.issuperset(tried):  # a file or a function, which may have changed
        return make()
    return kept_plan(captured, make, options, request.cluster, device)


def _measured(
    request: PlanRequest, captured: Captured, device: str | None
) -> tuple[Captured, Profile | None]:
    """The model with its words in as many parts as are asked for, and what it takes on a device, if any."""
    if (parts := request.options.word_parts or 1) > 1 and not captured.split_words:
        captured = in_parts(captured, parts)
    if device is None:
        return captured, None
    return captured, profile(captured, device=device, compile=request.options.compile)


def _model_of_lengths(
    request: PlanRequest, job: Job, size: int, device: str | None, captured: Captured | None
) -> CapturedModel:
    """The model of the longest sequence length, with times that are means over all lengths.

    device: where each is measured, see `plan_size`.
    captured: used for the length that it has; others are captured as it was, with words in as many parts.
    """
    from .tracer.job_calls import at_length, sample_batch

    def like(one: Captured, batch: Mapping[str, Tensor]) -> Captured:
        dtype, kind = one.autocast or (None, "cpu")
        return capture(job, size, batch=batch, autocast=dtype, device=kind, split=one.split_words)

    shares, by_length = request.options.histogram, dict[int, tuple[float, CapturedModel]]()
    for length, share in shares.items():
        batch = sample_batch(at_length(job, length), 0, size)
        shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
        if captured is None:
            model = _model_for(request, job, size, batch=batch)
        else:
            same = {v.name: v.shape for v in captured.graph.inputs} == shapes
            own, profiled = _measured(request, captured if same else like(captured, batch), device)
            model = _model_for(request, job, size, captured=own, profiled=profiled, batch=batch)
        by_length[length] = share, model
    return mean_of_lengths(by_length)


def mean_of_lengths(by_length: Mapping[int, tuple[float, CapturedModel]]) -> CapturedModel:
    """The model of the longest, whose ops take the mean of the times that they have at each length.

    by_length: ascending; of each its share and its model.
    Raises: PlanError if the model has other ops at one of them.
    """
    (longest, (_, last)) = list(by_length.items())[-1]
    for length, (_, model) in by_length.items():
        if model.graph.fingerprint != last.graph.fingerprint:
            raise PlanError(
                f"the model has other ops at length {length} than at {longest}",
                hint="leave that length out, and plan for the others",
            )

    def mean(device: str, op: str, cost: OpCost) -> OpCost:
        each = [(share, model.profiles[device].costs[op]) for share, model in by_length.values()]
        times = ("forward_s", "input_grad_s", "weight_grad_s")
        return replace(cost, **{t: sum(share * getattr(one, t) for share, one in each) for t in times})

    profiles = {
        device: replace(known, costs={op: mean(device, op, cost) for op, cost in known.costs.items()})
        for device, known in last.profiles.items()
    }
    return replace(last, profiles=profiles, by_length=by_length)


def plan_at_size(
    request: PlanRequest, job: Job, search: Callable[[PlanRequest, ModelAt], tuple[Plan, ProfiledModel]]
) -> tuple[Plan, ProfiledModel]:
    """The plan for the micro-batch size that a search (`largest_plan` or `best_plan`) finds, and the model at
    it. If the job has no batch of any size that was tried, its own error is passed on."""
    try:
        plan, model = search(request, partial(_model_if_batch, request, job))
    except _NoBatch as error:
        assert error.__cause__ is not None, "it was raised from what Job.batch raised"
        raise error.__cause__ from None
    if request.options.word_parts is None and isinstance(model, CapturedModel):
        model_of = partial(_split_model, request, job, model.size, None)
        plan, model = best_words(request, model, model_of) or (plan, model)
    return plan, model


def _split_model(
    request: PlanRequest, job: Job, size: int, profiled: Profile | None, split: Captured
) -> CapturedModel:
    """The model with split words. profiled: of whole ones, on the device where it is to be measured again."""
    if profiled is not None and (device := _device_here(profiled)) is not None:
        profiled = profile(split, device=device, compile=request.options.compile)
    return _model_for(request, job, size, captured=split, profiled=profiled)


def _device_here(profiled: Profile) -> str | None:
    """The type of this machine's device that a profile was measured on, by the name that its maker gave it;
    None for a device that is not here, and for estimates."""
    import torch

    from .profiler.measure_op import device_name
    from .run_options import named_device

    here = ("cpu", named_device("auto")) if profiled.source == "measured" else ()
    return next((kind for kind in here if device_name(torch.device(kind)) == profiled.device), None)


class _NoBatch(CaptureError):
    """`Job.batch` failed; the cause says why."""


def _model_if_batch(request: PlanRequest, job: Job, size: int) -> ProfiledModel:
    """The model at a size that the user may not have asked for."""
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
    """The model with its costs; each rank of this machine is one of several that compute at once."""
    if (parts := request.options.word_parts or 1) > 1 and (captured is None or not captured.split_words):
        if profiled is not None:
            raise PlanError(
                "the profile is of a model with whole words, the plan is to split them",
                hint="leave the profile out, or --split-words",
            )
        captured = in_parts(captured or capture(job, size, batch=batch), parts)
    model_for = partial(
        captured_model,
        job,
        size,
        None if request.local else request.cluster,
        profiled=profiled,
        batch=batch,
        compiled=request.options.compile,
        master_weights=request.options.master_weights,
        ranks=request.options.devices if request.local else 1,
    )
    if request.local or captured is not None:
        return model_for(captured=captured)
    # What is measured here has the machine to itself: kernels are compiled beside a mere capture only.
    with kernels_compiled_beside(request.options.planner, request.options.allowed) as wait_for_code:
        model = model_for()
        wait_for_code(model.graph)
    return model


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
    master_weights: bool = False,
    ranks: int = 1,
) -> CapturedModel:
    """A job captured at one micro-batch size, and its costs: by roofline on a cluster, or measured here
    within the last day.

    batch: one of that size, if it is at hand.  compiled: costs of compiled functions are wanted.
    master_weights: see `with_updates`.  ranks: of this machine, which will compute at once.
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
    given = captured is not None
    if captured is not None:
        graph = with_updates(captured.graph, job, devices, master_weights)
    else:
        captured = capture(job, size, batch=batch, devices=devices, master_weights=master_weights)
        graph = captured.graph
    if (rows := shared_rows(captured.graph)) not in (None, size):
        if not given:
            raise PlanError(
                f"Job.batch of {job.name} gives {rows} rows where {size} are asked for",
                hint="let it give as many rows as its second argument says",
            )
        raise PlanError(
            f"the captured model has micro-batches of {rows} rows, the plan is for {size}",
            hint=f"capture it with {size} rows, or plan for {rows}",
        )
    if profiled is None and cluster is not None:
        profiles = estimate(graph, cluster, captured=captured)
        return CapturedModel(size=size, graph=graph, profiles=profiles, captured=captured)
    measured = profiled or kept_profile(captured, profile)
    if compiled and profiled is None:
        measured = compiled_profile(captured, measured)
    measured = beside_ranks(measured, graph, ranks)
    names = {"cpu", measured.device, *kinds}
    profiles = dict.fromkeys(sorted(names), measured)
    return CapturedModel(size=size, graph=graph, profiles=profiles, captured=captured)


def model_of_plan(
    job: Job, plan: Plan, cluster: Cluster | None, *, profiled: Profile | None = None
) -> CapturedModel:
    """The model of a plan with its costs, as they are had for planning.

    cluster: None for processes of this machine.  profiled: instead of what is measured or estimated.
    Raises: PlanError if the job's batches have other shapes.
    """
    captured = capture(job, plan.microbatch_size, split=plan.split_words)
    if plan.batch and (shapes := batch_text(captured.graph.inputs)) != plan.batch:
        raise PlanError(
            f"micro-batches of {job.name} are {', '.join(shapes)}, the plan is for {', '.join(plan.batch)}",
            hint="let Job.batch give those; a plan for several --lengths is for the longest",
        )
    return captured_model(
        job,
        plan.microbatch_size,
        cluster,
        captured=captured,
        profiled=profiled,
        compiled=cluster is None and COMPILED in plan.notes,
        master_weights=plan.master_weights,
        ranks=plan.ranks if cluster is None else 1,
    )


def require_compiled(profiled: Profile | None, cluster: Cluster | None) -> None:
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


ModelAt: TypeAlias = Callable[[int], ProfiledModel]
"""Micro-batch size -> the model captured and profiled at it."""

VERIFIED = 3
"""Sizes that are captured as they are, from the largest downwards, before one is advised."""

REACH = 64
"""Where the model cannot be captured at a size, so many smaller ones are tried in its place."""


class CapturableSizes:
    """Some sizes (ascending), of which the model may not be had at all: batch normalisation wants two rows,
    `Job.batch` may want multiples of eight."""

    def __init__(self, sizes: Sequence[int], model_at: ModelAt) -> None:
        self.sizes = sizes

        @cache
        def model_if_captured(size: int) -> ProfiledModel | None:
            try:
                return model_at(size)
            except CaptureError:
                return None

        self.model_at = model_if_captured

    def near(self, index: int) -> ProfiledModel | None:
        """The model at that size or, if it cannot be captured, at the next smaller one within reach."""
        places = range(index, max(index - REACH, -1), -1)
        return next(self.models(self.sizes[place] for place in places), None)

    def around(self, size: int) -> list[ProfiledModel]:
        """The model at two sizes of several rows to interpolate between, or at fewer."""
        tried = (size, size + 1, size - 1, size + 2, 2 * size, 3 * size, size // 2, size - size % 8)
        several = (number for number in dict.fromkeys(tried) if number > 1)
        return list(islice(self.models(several), 2))

    def models(self, sizes: Iterable[int]) -> Iterator[ProfiledModel]:
        return (model for model in map(self.model_at, sizes) if model is not None)


def largest_below(request: PlanRequest, upper: ProfiledModel, model_at: ModelAt) -> int | None:
    """The largest size below that of `upper` that has a plan; 0 if none was found.

    By interpolation between `upper` and a much smaller micro-batch; None if the model cannot be captured at
    any of those tried, or has other ops there. One row is looked at as it is: models may do without some
    ops then.
    """
    quiet = request.for_advice
    capturable = CapturableSizes([size for size in request.sizes() if size < upper.size], model_at)

    several = [size for size in capturable.sizes if size > 1]
    if several:
        tried = (*several[:VERIFIED], 4, 8, upper.size // 2)
        lower = next(capturable.models(size for size in dict.fromkeys(tried) if 1 < size < upper.size), None)
        if lower is None or lower.graph.fingerprint != upper.graph.fingerprint:
            return None  # there is nothing to interpolate
        guess = largest_size(several, lambda size: quiet.fits(interpolate_sample(lower, upper, size)))
        near = [] if guess is None else [size for size in several if size <= guess][-REACH:]
        for model in islice(capturable.models(reversed(near)), VERIFIED):  # interpolation may be too bold
            if quiet.fits(model):
                return model.size
    one = capturable.model_at(1) if 1 in capturable.sizes else None
    return 1 if one is not None and quiet.fits(one) else 0


def largest_plan(request: PlanRequest, model_at: ModelAt) -> tuple[Plan, ProfiledModel]:
    """The plan with the largest micro-batches that fit, and the model at that size.

    Sizes are judged by interpolation between two at which the model was captured, unless it has other ops at
    one of them. At the size that is found it is captured too, and at smaller ones until one fits. Sizes at
    which the model cannot be captured are passed over.
    """
    sizes = request.sizes()
    capturable = CapturableSizes(sizes, model_at)
    first = min(range(len(sizes)), key=lambda index: abs(sizes[index] - request.options.microbatch_size))
    ends = capturable.around(sizes[max(first, 1)]) if len(sizes) > 2 else []
    alike = len(ends) > 1 and ends[0].graph.fingerprint == ends[1].graph.fingerprint

    def fits(index: int) -> bool:
        model = capturable.near(index)
        return model is not None and request.fits(model)

    def seems_to_fit(index: int) -> bool:
        return request.fits(interpolate_sample(ends[0], ends[1], sizes[index])) if alike else fits(index)

    index = largest_size(range(len(sizes)), seems_to_fit, start=first) or 0
    while index > 0 and not fits(index):
        index -= 1
    # Interpolation may have been too careful: the next size is tried as it is.
    while index + 1 < len(sizes) and fits(index + 1):
        index += 1
    model = capturable.near(index) or next(iter(ends), None) or model_at(sizes[first])
    plan = plan_with_advice(request, model)
    if request.options.global_batch is None and model.size == sizes[-1]:
        _log.warning("%s rows are the largest micro-batch that is looked at: more may fit", f"{sizes[-1]:,}")
    return plan, model


MOST_VERIFIED = 3
"""Sizes that are captured and planned as they are, the best by interpolation first."""


def best_plan(request: PlanRequest, model_at: ModelAt) -> tuple[Plan, ProfiledModel]:
    """The plan with the fastest simulated step over all sizes that divide the global batch, and the model at
    that size; of equally fast ones the smallest.

    Sizes are ranked by interpolation between two near the request's at which the model was captured, unless
    it has other ops at one of them; the first few are then captured themselves. Sizes at which the model
    cannot be captured, or that the schedule cannot run, are passed over. All share a time limit.
    """
    if request.options.global_batch is None:
        raise ConfigError(
            "the best micro-batch size is that of a number of rows per step, and there is none",
            hint="say how many rows a step has: --global-batch 64",
        )
    sizes, until = request.sizes(), request.until
    capturable = CapturableSizes(sizes, model_at)
    near = min(sizes, key=lambda size: abs(size - request.options.microbatch_size))
    limit_s = request.options.time_limit

    def within(part: int) -> PlanRequest:
        return request if limit_s is None else request.changed(time_limit=max(1, limit_s // part))

    ends = capturable.around(near) if len(sizes) > MOST_VERIFIED else []
    ranked = list(sizes)
    if len(ends) > 1 and ends[0].graph.fingerprint == ends[1].graph.fingerprint:
        guess = within((MOST_VERIFIED + 1) * len(sizes)).for_advice
        guesses = fitting(
            sizes,
            lambda size: guess.plan(interpolate_sample(ends[0], ends[1], size), explained=False),
            passed=(PlanError, ScheduleError),
        )
        step_s = {size: guessed.predicted_step_s for guessed, size in guesses}
        ranked = sorted(sizes, key=lambda size: step_s.get(size, inf))[:MOST_VERIFIED]
    plan = partial(within(len(ranked) + 1).plan, explained=False)
    best = fastest(fitting(capturable.models(sorted(ranked)), plan))
    if best is not None:
        return best
    model = next(capturable.models(ranked), None) or model_at(near)
    return plan_with_advice(request.limited_to(until), model), model  # raises, with what would fit
