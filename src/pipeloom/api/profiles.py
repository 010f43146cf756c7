"""Profiles: what ops cost, measured on this machine or by roofline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..ir.cluster import Cluster, Device
from ..ir.errors import ConfigError
from ..ir.graph import OpGraph
from ..ir.profile import Profile
from ..profiler.roofline import roofline
from .compiled_profiles import compiled_profile

if TYPE_CHECKING:
    from ..tracer.captured import Captured


def profile(captured: Captured, *, device: str = "cpu", compiled: bool = False) -> Profile:
    """Measure every op of a captured model on this machine's `device` ("cpu" or "cuda"), whatever is kept of
    earlier measurements.

    captured: what `capture` gave; its micro-batch size is that of the costs.
    compiled: the costs are those that ops have in stages that torch.compile made. How these compare with
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
    return compiled_profile(captured, eager, device=device) if compiled else eager


def _eager_profile(captured: Captured, device: str = "cpu") -> Profile:
    from .devices import usable_device  # only now: it imports torch

    usable_device(device)
    if captured.graph.fallback:
        from ..profiler.measure_modules import measure_modules

        return measure_modules(captured, device=device)
    from ..profiler.measure_ops import measure

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
