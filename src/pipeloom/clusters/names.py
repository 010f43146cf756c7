"""Clusters by name: "8 x a100-40", "2 nodes of 8 x h100-sxm", or the path of a cluster file.

    cluster  part ["+" part] ...
    part     [N "nodes of"] [N "x"] DEVICE ["with" SIZE]

Each part is in a node, or nodes, of its own. DEVICE is a built-in device (see `devices.py`), SIZE the memory
that plans may use of each instead of what it has. Other machines are described in files (`files.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..ir.cluster import MOST_DEVICES, Cluster, Device, Link, refuse_too_many
from ..ir.errors import ConfigError, shown
from ..ir.text import format_bytes, parse_bytes
from .devices import BuiltIn, built_in
from .files import load_cluster

_PART = re.compile(
    r"(?:(?P<nodes>\d+) nodes? of )?(?:(?P<count>\d+) ?[x*×] ?)?(?P<name>.+?)(?: with (?P<size>.+))?",
    re.IGNORECASE,
)
_HINT = 'write it as "8 x a100-40" or "2 nodes of 8 x h100", or give the path of a cluster file'

CONTAINER_LIMITS = tuple(
    Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")
)
"""Of memory, in bytes: in control groups of version 2, and of version 1."""
DIGITS = 30
"""Of a number of nodes or devices, at most."""


def find_cluster(text: str) -> Cluster:
    """The cluster that a text names, or the one that a file describes.

    >>> cluster = find_cluster("2 nodes of 4 x a100-40")
    >>> len(cluster.devices), cluster.devices[7].name, cluster.devices[7].node
    (8, 'a100-40-sxm', 1)

    Raises: ConfigError with what is wrong and the nearest names.
    """
    path = Path(text)
    if path.suffix == ".toml" or os.sep in text or os.path.isfile(text):  # False for a name that is too long
        return load_cluster(path)
    return _cluster([_part(part) for part in text.split("+")])


def cpu_cluster(devices: int, *, memory: str | int | None = None) -> Cluster:
    """Processes of one thread each on this machine, with the figures of the built-in device "cpu".

    memory: cap of each; by default an equal share of the machine's memory.
    """
    if devices < 1:
        raise ConfigError(f"a cluster of {shown(devices)} devices", hint="use at least 1")
    size = None if memory is None else parse_bytes(memory, what="memory")
    return _cluster([_Part(1, devices, built_in("cpu"), size)])


def machine_memory() -> int:
    """Bytes of memory that this machine has, or the container that this runs in may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CONTAINER_LIMITS:
        try:
            limit = file.read_text().strip()
        except OSError:
            continue  # not in a container, or of the other kind
        if limit.isdigit():  # else "max"
            limits.append(int(limit))
    return min(limits)


@dataclass(frozen=True)
class _Part:
    nodes: int
    count: int
    kind: BuiltIn
    memory_bytes: int | None

    @property
    def even(self) -> bool:
        """Whether all devices of a node are joined alike."""
        return "group" not in self.kind.figures or self.kind.figures["group"].size >= self.count

    @property
    def node_wide(self) -> Link:
        """The link of the devices of one node, of which the slowest counts."""
        return self.kind.figures[
            "group" if self.even and "group" in self.kind.figures else "within_node"
        ].link

    def shared(self, figure: str, node: int, index: int, links: dict[str, Link]) -> str | None:
        """The name of the group or switch of a node's device, and its link among `links`; None without."""
        found = self.kind.figures.get(figure)
        if found is None or self.count == 1 or (figure == "group" and self.even):
            return None
        name = f"{figure}-{node}-{index // found.size}"
        links[name] = found.link
        return name


def _part(text: str) -> _Part:
    match = _PART.fullmatch(" ".join(text.split()))
    if match is None:
        raise ConfigError(f"cannot read {text.strip()!r} as a part of a cluster", hint=_HINT)
    nodes, count = (_count(match[key] or "1") for key in ("nodes", "count"))
    if not nodes or not count:
        raise ConfigError(f"{text.strip()!r} has no device", hint="use at least 1 node and 1 device in each")
    try:
        kind = built_in(match["name"])
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}, and no file {text.strip()!r} exists", hint=f"{error.hint} Or {_HINT}"
        ) from None
    size = None if match["size"] is None else parse_bytes(match["size"])
    if size is not None and "memory" in kind.figures and size > kind.bytes("memory"):
        raise ConfigError(
            f"{text.strip()!r}, but {kind.name} has {format_bytes(kind.bytes('memory'))}",
            hint="say how much of it plans may use, or leave that out",
        )
    return _Part(nodes, count, kind, size)


def _count(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ConfigError(
            f"{shown(digits)}: a number of devices with {len(digits)} digits",
            hint=f"describe at most {MOST_DEVICES}",
        )
    return int(digits)


def _cluster(parts: Sequence[_Part]) -> Cluster:
    """Ranks in the order of the parts; one link within nodes if all parts have the same, else each node's as
    that of a group, and the slowest between groups of a node."""
    total = sum(part.nodes * part.count for part in parts)
    refuse_too_many(total)
    devices: list[Device] = []
    groups: dict[str, Link] = {}
    switches: dict[str, Link] = {}
    one = len({part.node_wide for part in parts}) == 1
    node = 0
    for part in parts:
        kind, memory = part.kind, part.memory_bytes
        if memory is None and "memory" in kind.figures:
            memory = kind.bytes("memory") - kind.bytes("reserved")
        if memory is None:  # a share of this machine's
            memory = machine_memory() // total
        device = kind.device(memory_bytes=memory)
        for _ in range(part.nodes):
            for index in range(part.count):
                group = part.shared("group", node, index, groups)
                if group is None and not one:
                    group = f"node-{node}"
                    groups[group] = part.node_wide
                switch = part.shared("switch", node, index, switches)
                devices.append(replace(device, node=node, group=group, switch=switch))
            node += 1
    links = [link for part in parts if (link := part.kind.link("node_link"))]
    uneven = [part for part in parts if not part.even]  # others have a group for all of a node
    return Cluster(
        devices=tuple(devices),
        groups=groups,
        switches=switches,
        within_node=_slowest([part.node_wide for part in uneven or parts]),
        between_nodes=_slowest([part.kind.figures["between_nodes"].link for part in parts])
        if node > 1
        else None,
        node_link=_slowest(links) if links and node > 1 else None,
    )


def _slowest(links: list[Link]) -> Link:
    return min(links, key=lambda link: link.bandwidth_bytes_per_s)
