"""The passes before planning, and after it: capture, profile, estimate, simulate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .compiled_profiles import compiled_profile
from .ir.cluster import Cluster, Device, is_cpu
from .ir.errors import ConfigError, PlanError
from .ir.graph import OpGraph
from .ir.plan import Plan
from .ir.profile import Profile
from .ir.timeline import Timeline
from .planner.plan_costs import PlanCosts, with_planned_state
from .profiler.roofline import roofline
from .tracer.job import Job

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from .tracer.captured import Captured


def capture(
    job: Job,
    microbatch_size: int,
    *,
    batch: Mapping[str, Tensor] | None = None,
    autocast: dtype | None = None,
    devices: Iterable[str] = (),
) -> Captured:
    """Turn a job's model and loss into an OpGraph and what can be run; see `tracer.capture`.

    job: its model is built on fake tensors, which take no memory.
    microbatch_size: rows per micro-batch.  batch: a micro-batch to take the shapes from instead, tensors
    whose first dimension is the micro-batch, by the names of the forward's arguments.
    autocast: torch.bfloat16 for mixed precision; None for none.
    devices: names of those that the job's optimizer is to run on, by default CPUs; see `with_updates`.
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
    from .options import require_autocast
    from .tracer.capture import capture as trace

    require_autocast(autocast)
    captured = trace(job, microbatch_size, batch=batch, autocast=autocast)
    return replace(captured, graph=with_updates(captured.graph, job, devices))


def with_updates(graph: OpGraph, job: Job, devices: Iterable[str] = ()) -> OpGraph:
    """The graph with what the job's optimizer takes for each parameter.

    devices: names of those it is to run on, by default CPUs (`ir.cluster.is_cpu`). On others PyTorch's
    optimizers update many parameters at once.
    Raises: PlanError if the optimizer cannot train the model.
    """
    from .runtime.optimizer_bytes import stand_ins, update_bytes

    kind = "cpu" if all(map(is_cpu, devices)) else "cuda"
    return graph.with_updates(update_bytes(job.optimizer, stand_ins(graph), kind))


def profile(captured: Captured, *, device: str = "cpu", compile: bool = False) -> Profile:
    """Measure every op of a captured model on this machine's `device` ("cpu" or "cuda"), whatever is kept of
    earlier measurements.

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
    eager = _eager_profile(captured, device)
    return compiled_profile(captured, eager, device=device) if compile else eager


def _eager_profile(captured: Captured, device: str = "cpu") -> Profile:
    from .ranks import usable_device  # only now: it imports torch

    usable_device(device)
    if captured.graph.fallback:
        from .profiler.measure_modules import measure_modules

        return measure_modules(captured, device=device)
    from .profiler.measure_ops import measure

    # The thread's own time: what others take of the core, such as ranks that start, is none of an op.
    return measure(captured, device=device, clock=time.thread_time)


def estimate(graph: OpGraph, cluster: Cluster) -> dict[str, Profile]:
    """Profiles by roofline for every kind of device of a cluster, which need not be there.

    Raises: ConfigError if devices of one name compute at different rates.
    """
    kinds: dict[str, Device] = {}
    for device in cluster.devices:
        first = kinds.setdefault(device.name, device)
        if _rates(first) != _rates(device):
            raise ConfigError(
                f"the cluster has devices named {device.name} that compute at different rates",
                hint="give each kind of device a name of its own",
            )
    return {name: roofline(graph, device) for name, device in kinds.items()}


def _rates(device: Device) -> tuple[object, ...]:
    """What the time of an op depends on."""
    return device.flops_per_s, device.memory_bytes_per_s, device.efficiency, device.launch_s


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
    >>> plan = pipeloom.plan(job, ranks=2, microbatch_size=4, cluster="2 x a100-40", captured=captured)
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
