"""Clusters: by name, in files, and this machine measured: its devices, their links and those to the host."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .ir.cluster import Cluster, Device, Link, refuse_too_many
from .ir.errors import ConfigError
from .profiler.measurement import Measurement, connected_components, summarise_runs, usable_cores

if TYPE_CHECKING:
    import torch


ALIKE = 1.5
"""Pairs of devices whose links differ by less than this factor count as joined alike."""


def detect(
    kind: str = "cpu",
    *,
    devices: int | None = None,
    directory: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Cluster, list[Measurement]]:
    """Measure this machine's devices. Returns: the cluster, and each figure with its spread.

    kind: "cpu", a type of accelerator such as "cuda", or "auto".
    devices: so many processes of one thread each, by default one per core; of the
    GPUs the first so many, by default all.  directory: where files of offloaded tensors would be, for the
    CPU; without it, it has nowhere to offload to.  progress: told what is measured next.
    """
    if devices is not None and devices < 1:
        raise ConfigError(f"{devices} devices to measure", hint="use at least 1")
    refuse_too_many(devices or 0)
    from .run_options import named_device

    if (kind := named_device(kind)) != "cpu":
        return _gpus(kind, devices, directory, progress)
    return _processes(devices or usable_cores(), directory, progress)


def _processes(
    count: int, directory: Path | None, progress: Callable[[str], None]
) -> tuple[Cluster, list[Measurement]]:
    import torch

    from .profiler.detect import detect_device
    from .runtime.allocator import keep_freed_memory
    from .runtime.calibrate import local_links

    progress("messages between two processes")
    links = local_links()
    progress("the processor")
    keep_freed_memory()  # as ranks do
    device, rows = detect_device(torch.device("cpu"))
    device = replace(device, memory_bytes=device.memory_bytes // count)
    link, sent = _middle(links)
    cluster, tier = Cluster(devices=(device,) * count, within_node=link), list[Measurement]()
    if directory is not None:
        progress(f"files in {directory}")
        cluster, tier = with_files(cluster, directory)
    return cluster, [*rows, *tier, *sent]


def with_files(cluster: Cluster, directory: Path) -> tuple[Cluster, list[Measurement]]:
    """The same processes with files in a directory to offload to, which is made if need be: a disk that they
    share, as fast as it is found to be now, which takes a few seconds."""
    from .profiler.host_copies import file_tier

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot offload to {directory}: {error.strerror}", hint="name a folder on a disk with room"
        ) from None
    out, back, rows = file_tier(directory)
    free_bytes = shutil.disk_usage(directory).free // len(cluster.devices)
    devices = tuple(
        replace(device, host_link=out, host_link_back=back, host_memory_bytes=free_bytes, switch="disk")
        for device in cluster.devices
    )
    switches = {"disk": min((out, back), key=lambda link: link.bandwidth_bytes_per_s)}
    return replace(cluster, devices=devices, switches=switches), rows


def disk_speed(cluster: Cluster) -> str:
    device = cluster.devices[0]
    assert device.host_link is not None and device.host_link_back is not None, "files were measured"
    out, back = (link.bandwidth_bytes_per_s / 1e6 for link in (device.host_link, device.host_link_back))
    return (
        f"offloading: files, just measured, take {out:.0f} MB/s and give back {back:.0f} MB/s, which "
        f"{len(cluster.devices)} processes share"
    )


def _middle(links: list[Link]) -> tuple[Link, list[Measurement]]:
    units = dict(bandwidth_bytes_per_s="B/s", latency_s="s", overhead_s="s", overhead_s_per_byte="s/B")
    rows = {
        key: summarise_runs(f"within_node.{key}", [getattr(link, key) for link in links], unit)
        for key, unit in units.items()
    }
    return Link(**{key: row.value for key, row in rows.items()}), list(rows.values())


def _gpus(
    kind: str, count: int | None, directory: Path | None, progress: Callable[[str], None]
) -> tuple[Cluster, list[Measurement]]:
    import torch

    from .profiler.host_copies import gpu_links, shared_uplinks

    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if there < (count or 1):
        raise ConfigError(
            f"{count or 1} GPUs to measure, and this machine has {there}",
            hint="measure the processor with --device cpu" if not there else f"use at most {there}",
        )
    if directory is not None:
        raise ConfigError(
            "a directory for offloaded tensors was given for GPUs",
            hint="leave it out: GPUs offload to the host's memory",
        )
    wheres = [torch.device(kind, index) for index in range(count or there)]
    devices, rows = _distinct(wheres, progress)
    first = devices[0].host_link
    assert first is not None, "GPUs have a link to the host"
    switches: dict[str, Link] = {}
    if len(wheres) > 1:
        progress("copies of several GPUs at once, and between them")
        switch, together = shared_uplinks(wheres, first.bandwidth_bytes_per_s)
        devices, switches = below_switches(devices, switch, together)
    links, between = gpu_links(wheres)
    within, groups, group = grouped(links, len(devices))
    devices = [replace(device, group=name) for device, name in zip(devices, group, strict=True)]
    through_host = Link(bandwidth_bytes_per_s=first.bandwidth_bytes_per_s / 2, latency_s=2 * first.latency_s)
    joined = within or through_host
    cluster = Cluster(devices=tuple(devices), within_node=joined, groups=groups, switches=switches)
    return cluster, [*rows, *between]


def _distinct(
    wheres: list[torch.device], progress: Callable[[str], None]
) -> tuple[list[Device], list[Measurement]]:
    """Each kind of GPU measured once; what each has free, and its share of the host's memory, by itself."""
    import torch

    from .profiler.detect import detect_device, free_memory
    from .profiler.host_copies import pinned_copies
    from .profiler.measure_op import device_name

    kinds: dict[str, Device] = {}
    rows: list[Measurement] = []
    devices = []
    host_bytes = free_memory(torch.device("cpu")) // len(wheres)
    for where in wheres:
        name = device_name(where)
        if name not in kinds:
            progress(name)
            with torch.accelerator.device_index(where.index):
                device, figures = detect_device(where)
                out, back, copies = pinned_copies(where)
                torch.accelerator.empty_cache()
            kinds[name] = replace(device, host_link=out, host_link_back=back, host_memory_bytes=host_bytes)
            rows += [replace(row, name=f"{name}: {row.name}") for row in (*figures, *copies)]
        devices.append(replace(kinds[name], memory_bytes=free_memory(where)))
    return devices, rows


def below_switches(
    devices: list[Device], switch: list[int], together: list[float]
) -> tuple[list[Device], dict[str, Link]]:
    """Devices with the names of the uplinks that they share with others, and those uplinks.

    switch: per device the first device below its switch.  together: per device the rate of all below it.
    """
    links: dict[str, Link] = {}
    placed = []
    for device, first, rate in zip(devices, switch, together, strict=True):
        shared = switch.count(first) > 1
        if shared:
            links[f"switch-{first}"] = Link(bandwidth_bytes_per_s=rate)
        placed.append(replace(device, switch=f"switch-{first}" if shared else None))
    return placed, links


def grouped(
    links: Mapping[tuple[int, int], Link], count: int
) -> tuple[Link | None, dict[str, Link], list[str | None]]:
    """The slowest link, those of groups of devices that are joined faster, and each device's group.

    A group needs all its pairs to be fast, and gets the slowest of their links.

    >>> slow, fast = Link(bandwidth_bytes_per_s=10e9), Link(bandwidth_bytes_per_s=90e9)
    >>> links = {(a, b): fast if (a, b) in ((0, 1), (2, 3)) else slow for b in range(4) for a in range(b)}
    >>> grouped(links, 4)[2]
    ['group-0', 'group-0', 'group-2', 'group-2']
    """
    if not links:
        return None, {}, [None] * count
    ordered = sorted(links.values(), key=lambda link: link.bandwidth_bytes_per_s)
    limit = ALIKE * ordered[0].bandwidth_bytes_per_s
    fast = [pair for pair, link in links.items() if link.bandwidth_bytes_per_s > limit]
    first = connected_components(fast, count)
    groups: dict[str, Link] = {}
    for leader in set(first):
        inside = [pair for pair in links if first[pair[0]] == first[pair[1]] == leader]
        if inside and all(pair in fast for pair in inside):
            slowest = min((links[pair] for pair in inside), key=lambda link: link.bandwidth_bytes_per_s)
            groups[f"group-{leader}"] = slowest
    names = [f"group-{leader}" if f"group-{leader}" in groups else None for leader in first]
    return ordered[0], groups, names
