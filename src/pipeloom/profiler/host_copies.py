"""How fast tensors get out of a device and back: pinned copies of GPUs, files for the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from ..ir.cluster import Link, MiB
from ..ir.errors import ConfigError
from .measure_op import Timer
from .measurement import Measurement, connected_components, summarise_runs

FILE_BYTES = 64 * MiB
COPY_BYTES = 256 * MiB
REPEATS = 5
SHARED = 0.75
"""Two devices share something if copies at once get less than this share of what they get alone."""


def file_tier(directory: Path, *, file_bytes: int = FILE_BYTES) -> tuple[Link, Link, list[Measurement]]:
    """Links to and from a file in a directory, written and read as the CPU offloads.

    Written data counts once it is on the disk, and is read from there: a cache in memory would save none.
    file_bytes: how large a file is written and read.
    Raises: ConfigError if the directory does not take a file of that size.
    """
    source, target = torch.ones(file_bytes, dtype=torch.uint8), torch.empty(file_bytes, dtype=torch.uint8)
    writes, reads = [], []
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            number = file.fileno()
            os.posix_fallocate(number, 0, file_bytes)
            for _ in range(REPEATS):
                writes.append(file_bytes / _seconds(lambda: _write(number, source)))
                os.posix_fadvise(number, 0, file_bytes, os.POSIX_FADV_DONTNEED)
                reads.append(file_bytes / _seconds(lambda: os.preadv(number, [target.numpy().data], 0)))
    except OSError as error:
        raise ConfigError(
            f"cannot keep a file of {file_bytes // MiB} MiB in {directory}: {error.strerror}",
            hint="name a directory on a disk with room",
        ) from None
    rows = [summarise_runs("host_link", writes, "B/s"), summarise_runs("host_link_back", reads, "B/s")]
    return Link(bandwidth_bytes_per_s=rows[0].value), Link(bandwidth_bytes_per_s=rows[1].value), rows


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _write(file: int, source: Tensor) -> None:
    os.pwrite(file, source.numpy().data, 0)
    os.fdatasync(file)


def pinned_copies(where: torch.device) -> tuple[Link, Link, list[Measurement]]:
    """Links of a GPU to the host's memory and back."""
    timer = Timer(where)
    links, rows = [], []
    for name in ("host_link", "host_link_back"):
        large, small = (_copy(where, size, to_host=name == "host_link") for size in (COPY_BYTES, 8))
        rates = summarise_runs(name, [COPY_BYTES / took for took in timer.samples(large, 0.3)], "B/s")
        latency = summarise_runs(f"{name}.latency_s", timer.samples(small, 0.05), "s")
        links.append(Link(bandwidth_bytes_per_s=rates.value, latency_s=latency.value))
        rows += [rates, latency]
    return links[0], links[1], rows


def _copy(where: torch.device, size: int, *, to_host: bool) -> Callable[[], Tensor]:
    there = torch.empty(size, dtype=torch.uint8, device=where)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    source, target = (there, host) if to_host else (host, there)
    return lambda: target.copy_(source, non_blocking=True)


def shared_uplinks(devices: Sequence[torch.device], alone: float) -> tuple[list[int], list[float]]:
    """Which GPUs share an uplink to the host, and what copies of all that do get together, in B/s.

    alone: bytes per second of one GPU's copies to the host.
    Returns: per GPU the first one below its switch; per GPU the rate of all below its switch.
    """
    copies = [_copy(device, COPY_BYTES, to_host=True) for device in devices]

    def together(members: Sequence[int]) -> float:
        return len(members) * COPY_BYTES / _at_once(devices, copies, members)

    pairs = [pair for pair in combinations(range(len(devices)), 2) if together(pair) < 2 * SHARED * alone]
    switch = connected_components(pairs, len(devices))
    rate = {first: together([i for i, s in enumerate(switch) if s == first]) for first in set(switch)}
    return switch, [rate[first] for first in switch]


def _at_once(
    devices: Sequence[torch.device], copies: Sequence[Callable[[], Tensor]], members: Sequence[int]
) -> float:
    """Seconds until copies of all members, started together, have ended; the median of a few."""
    took = []
    for _ in range(REPEATS):
        for i in members:
            torch.accelerator.synchronize(devices[i])
        start = perf_counter()
        for i in members:
            with torch.accelerator.device_index(devices[i].index):
                copies[i]()
        for i in members:
            torch.accelerator.synchronize(devices[i])
        took.append(perf_counter() - start)
    return median(took[1:])


def gpu_links(devices: Sequence[torch.device]) -> tuple[dict[tuple[int, int], Link], list[Measurement]]:
    """The link of every pair of GPUs, from copies in one direction, through the host if there is no other."""
    links, rates, latencies = {}, [], []
    for a, b in combinations(range(len(devices)), 2):
        timer = Timer(devices[a])
        with torch.accelerator.device_index(devices[a].index):
            large, small = (_peer_copy(devices[a], devices[b], size) for size in (COPY_BYTES, 8))
            rate = COPY_BYTES / timer(large, 0.1)
            latency = timer(small, 0.02)
        links[a, b] = Link(bandwidth_bytes_per_s=rate, latency_s=latency)
        rates.append(rate)
        latencies.append(latency)
    if not rates:
        return {}, []
    rows = [
        summarise_runs("between GPUs", rates, "B/s"),
        summarise_runs("between GPUs, latency", latencies, "s"),
    ]
    return links, rows


def _peer_copy(a: torch.device, b: torch.device, size: int) -> Callable[[], Tensor]:
    source = torch.empty(size, dtype=torch.uint8, device=a)
    target = torch.empty(size, dtype=torch.uint8, device=b)
    return lambda: target.copy_(source, non_blocking=True)
