"""Measuring a device: matrix products per dtype, memory, the launch of a kernel, and classes of ops.

Each device is measured alone, by one thread on the CPU, as `measure_ops.py` does. On the CPU that thread's
own time counts, so that other programs disturb less.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter, thread_time

import torch

from ..clusters.names import machine_memory
from ..ir.cluster import Device, MiB
from ..tracer.autocast import Autocast
from .efficiency import ON_CPU, ON_GPU, measure_efficiency
from .measure_op import Timer, device_name, torch_threads
from .measurement import Measurement, summarise_runs

BF16 = torch.bfloat16
DTYPES = (torch.float32, torch.float64, BF16, torch.float16)
PRODUCT_S = 0.5
"""Seconds for the products of one dtype."""

SHARES_S = 5.0
"""Seconds for the reference model."""

LAUNCHES = 200


def detect_device(where: torch.device) -> tuple[Device, list[Measurement]]:
    """One device's own figures, and all that was measured for them. Links come from `host_copies.py`.

    Memory: on a GPU what is free, on the CPU all of the machine's.
    """
    accelerated = where.type != "cpu"
    has_bf16 = not accelerated or torch.get_device_module(where).is_bf16_supported(including_emulation=False)
    timer = Timer(where, thread_time)
    with torch_threads(1):
        products = [measured_product(dtype, timer) for dtype in DTYPES if has_bf16 or dtype is not BF16]
        bandwidth = summarise_runs("memory_bytes_per_s", _bandwidths(timer), "B/s")
        launch = summarise_runs("launch_s", _launches(where), "s")
    device = Device(
        name=device_name(where),
        memory_bytes=free_memory(where),
        flops_per_s={rate.name.removeprefix("flops_per_s."): rate.value for rate in products},
        memory_bytes_per_s=bandwidth.value,
        launch_s=launch.value,
    )
    autocast = Autocast(BF16 if has_bf16 else torch.float16, where.type) if accelerated else None
    classes = measure_efficiency(
        device, where, sizes=ON_GPU if accelerated else ON_CPU, autocast=autocast, budget_s=SHARES_S
    )
    efficiency = {share.name: share.value for share in classes}
    efficiency["default"] = efficiency["elementwise"]
    named = [replace(share, name=f"efficiency.{share.name}") for share in classes]
    return replace(device, efficiency=efficiency), [*products, bandwidth, launch, *named]


def free_memory(where: torch.device) -> int:
    """Bytes of a GPU that a program can take now; of the CPU, all of the machine's memory."""
    if where.type != "cpu":
        return int(torch.accelerator.get_memory_info(where)[0]) + torch.accelerator.memory_reserved(where)
    return machine_memory()


def measured_product(dtype: torch.dtype, timer: Timer, *, budget_s: float = PRODUCT_S) -> Measurement:
    """Operations per second of the fastest square product; sizes double until the budget is spent."""
    until = perf_counter() + budget_s  # however much of that the thread gets
    size = 128 if timer.device.type == "cpu" else 2048
    best: list[float] = []
    while True:
        # Of random numbers: products of ones take less power, and on an H200 less time.
        a, b = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        times = timer.samples(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), budget_s / 8)  # type: ignore[misc]
        rates = [2 * size**3 / took for took in times]
        best = max(best, rates, key=lambda samples: sorted(samples)[len(samples) // 2] if samples else 0.0)
        size *= 2
        # The next size takes eight times as long, and is run at least four times.
        if perf_counter() + 8 * 4 * min(times) > until:
            return summarise_runs(f"flops_per_s.{str(dtype).removeprefix('torch.')}", best, "FLOP/s")


def _bandwidths(timer: Timer) -> list[float]:
    """Bytes per second of additions of tensors far larger than the caches: two reads and a write."""
    numbers = (64 if timer.device.type == "cpu" else 1024) * MiB // 4
    a, b, out = (torch.ones(numbers, device=timer.device) for _ in range(3))
    return [3 * a.nbytes / took for took in timer.samples(lambda: torch.add(a, b, out=out), 1.0)]


def _launches(where: torch.device) -> list[float]:
    """Seconds per kernel of many tiny ones in a row."""
    x = torch.zeros(8, device=where)

    def one() -> float:
        clock = thread_time if where.type == "cpu" else perf_counter
        start = clock()
        for _ in range(LAUNCHES):
            torch.add(x, x)
        if where.type != "cpu":
            torch.accelerator.synchronize(where)
        return (clock() - start) / LAUNCHES

    return [one() for _ in range(10)][1:]
