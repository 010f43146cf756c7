"""Cluster: devices and the links between them. Devices may differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .errors import ConfigError, did_you_mean, shown
from .text import LARGEST, odd_figure

GiB = 1024**3
MiB = 1024**2

MOST_BYTES = 1 << 63
MOST_DEVICES = 100_000
"""More memory and devices are refused."""

OP_CLASSES = ("matmul", "attention", "convolution", "normalisation", "elementwise", "default")
"""Classes of ops that differ in the share of the peak rate or bandwidth that they achieve."""


def is_cpu(device: str) -> bool:
    """Whether a device of this name is a CPU: the names of CPUs, and no others, begin with "cpu".

    >>> [is_cpu(name) for name in ("cpu", "cpu-fast", "cuda", "a100-40")]
    [True, True, False, False]
    """
    return device.startswith("cpu")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a connection between two devices.

    latency_s, bandwidth_bytes_per_s: of a message, from the start of its send until it is there. A bandwidth
        of `inf` means that its size costs no time.
    overhead_s, overhead_s_per_byte: time in which a message keeps its sender, and its receiver, from
        computing.

    Raises: ConfigError if the bandwidth is not above 0, or a time is below 0 or 1e30 s and more.

    >>> pcie = Link(bandwidth_bytes_per_s=24e9, latency_s=1e-5)
    >>> f"{pcie.transfer_s(240_000_000):.5f} s for 240 MB"
    '0.01001 s for 240 MB'
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        bandwidth = self.bandwidth_bytes_per_s
        if not bandwidth > 0 or sys.float_info.max < bandwidth < float("inf"):
            raise ConfigError(
                f"link has bandwidth {shown(bandwidth)} B/s",
                hint="use one above 0; inf where size costs no time",
            )
        _refuse_odd("link", vars(self) | {"bandwidth_bytes_per_s": None})

    def transfer_s(self, size: int) -> float:
        """Seconds to move `size` bytes: latency + size / bandwidth.

        Source: the time of a message as in Hockney 1994, "The communication challenge for MPP: Intel Paragon
        and Meiko CS-2", called the alpha-beta model.

        >>> Link(bandwidth_bytes_per_s=1e9, latency_s=0.5).transfer_s(2_000_000_000)
        2.5
        """
        return self.latency_s + size / self.bandwidth_bytes_per_s

    def occupied_s(self, size: int) -> float:
        """Seconds for which a message of `size` bytes keeps its sender, and its receiver, from computing: the
        `o` of LogP, with a part that grows with the size.

        Source: Culler et al. 1993, "LogP: towards a realistic model of parallel computation".

        >>> link = Link(bandwidth_bytes_per_s=1e9, overhead_s=0.5, overhead_s_per_byte=1e-9)
        >>> link.occupied_s(2_000_000_000)
        2.5
        """
        return self.overhead_s + size * self.overhead_s_per_byte


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    name: of its kind: devices of one name compute at the same rates, and share a profile.
    memory_bytes: the cap that plans keep to.
    flops_per_s: peak rate per dtype name, such as "float32".  memory_bytes_per_s: bandwidth of its memory.
    efficiency: op class (see `OP_CLASSES`) -> share of the peak that is achieved; classes not named use
        "default", and that is 1 if not named.
    launch_s: time that starting one kernel takes on top.
    node: index of the machine it sits in, from 0.
    group: devices of one group are joined by a link of their own (`Cluster.groups`), as by NVLink.
    host_link: to the host's memory, if there is one to offload to.  host_link_back: from there to the
        device, if that direction differs.
    host_memory_bytes: of its node, for this device.
    switch: devices of one name share one uplink to the host (`Cluster.switches`).

    Raises: ConfigError for no memory or more than 8 EiB, a rate of 0, a share of 0 or less, a figure below 0
        or of 1e30 and more, and for a link back from a host to which there is none.

    >>> link = Link(bandwidth_bytes_per_s=24e9)
    >>> card = Device(name="card", memory_bytes=16 * GiB, flops_per_s={"float32": 19.5e12}, host_link=link)
    >>> card.memory_bytes, card.reload_link == link
    (17179869184, True)
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    node: int = 0
    group: str | None = None
    host_link: Link | None = None
    host_link_back: Link | None = None
    host_memory_bytes: int = 0
    switch: str | None = None

    def __post_init__(self) -> None:
        if self.host_link is None and self.host_link_back is not None:
            raise ConfigError(
                f"device {self.name} has a link from the host's memory but none to it",
                hint="add host_link; host_link_back only says how the other direction differs",
            )
        for name, share in self.efficiency.items():
            if not 0 < share < LARGEST:
                raise ConfigError(
                    f"device {self.name} achieves a share of {shown(share)} of its peak in {name}",
                    hint="write a share above 0, at most 1 as a rule",
                )
        if not 0 < self.memory_bytes <= MOST_BYTES:
            raise ConfigError(
                f"device {self.name} has {shown(self.memory_bytes)} bytes of memory",
                hint="give each device a positive memory size, at most 8 EiB",
            )
        for dtype, rate in self.flops_per_s.items():
            if rate == 0:
                raise ConfigError(
                    f"device {self.name} has flops_per_s[{dtype}] = 0",
                    hint="give a rate above 0; leave out what it cannot compute in",
                )
        _refuse_odd(f"device {self.name}", vars(self) | {"host_link": None, "host_link_back": None})

    @property
    def reload_link(self) -> Link | None:
        """From the host's memory to the device; None if there is no host memory to offload to."""
        return self.host_link if self.host_link_back is None else self.host_link_back


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in rank order, with a link within a node and one between nodes.

    devices: the one at index r is that of rank r.
    within_node: the link between any two devices of one node.  between_nodes: that between two nodes; None
        where it is the same.
    groups: by `Device.group`, the link between any two devices of that group.
    switches: by `Device.switch`, one direction of its uplink to the host. Copies of all its devices to the
        host share it, and so do those from the host in the other direction; a single copy goes no faster
        than its device's own link.
    node_link: all messages that leave one node share it, and so do all that enter in the other direction,
        those of sums over ranks too; None if nothing is shared.

    Raises: ConfigError for a cluster of no device or more than `MOST_DEVICES`, a group or switch without a
        link, and a switch in two nodes.

    >>> card = Device(name="card", memory_bytes=GiB, group="pair")
    >>> slow, fast = Link(bandwidth_bytes_per_s=10e9), Link(bandwidth_bytes_per_s=100e9)
    >>> cluster = Cluster(devices=(card, card), within_node=slow, groups={"pair": fast})
    >>> cluster.link(0, 1) == fast
    True
    """

    devices: tuple[Device, ...]
    within_node: Link
    between_nodes: Link | None = None
    groups: Mapping[str, Link] = field(default_factory=dict)
    switches: Mapping[str, Link] = field(default_factory=dict)
    node_link: Link | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("the cluster has no device", hint="add at least one")
        refuse_too_many(len(self.devices))
        _known("group", (device.group for device in self.devices), self.groups)
        _known("switch", (device.switch for device in self.devices), self.switches)
        node: dict[str, int] = {}
        for device in self.devices:
            if device.switch is not None and node.setdefault(device.switch, device.node) != device.node:
                raise ConfigError(
                    f"switch {device.switch} is in node {node[device.switch]} and in node {device.node}",
                    hint="give the switches of each node names of their own",
                )

    def link(self, a: int, b: int) -> Link:
        """The link from rank `a` to rank `b`: of their group, else of their node, else between nodes.

        Raises: IndexError if there is no such rank.
        """
        one, other = self.devices[a], self.devices[b]
        if one.group is not None and one.group == other.group:
            return self.groups[one.group]
        if one.node == other.node or self.between_nodes is None:
            return self.within_node
        return self.between_nodes

    def with_memory(self, sizes: Sequence[int]) -> Cluster:
        """The same devices with other memory.

        sizes: of the first devices, in bytes; the others keep theirs.

        >>> card = Device(name="card", memory_bytes=GiB)
        >>> cluster = Cluster(devices=(card,) * 3, within_node=Link(bandwidth_bytes_per_s=1e9))
        >>> [device.memory_bytes // GiB for device in cluster.with_memory([4 * GiB, 2 * GiB]).devices]
        [4, 2, 1]
        """
        pairs = zip(self.devices, sizes, strict=False)
        first = tuple(replace(device, memory_bytes=size) for device, size in pairs)
        return replace(self, devices=first + self.devices[len(first) :])


def refuse_too_many(devices: int) -> None:
    """To be asked before so many are made."""
    if devices > MOST_DEVICES:
        raise ConfigError(
            f"the cluster has {shown(devices)} devices", hint=f"describe at most {MOST_DEVICES}"
        )


def _refuse_odd(what: str, figures: Mapping[str, object]) -> None:
    if (odd := odd_figure(figures)) is not None:
        raise ConfigError(
            f"{what} has {odd[0]} = {shown(odd[1])}",
            hint="rates, times and sizes are at least 0, and below 1e30",
        )


def _known(what: str, names: Iterable[str | None], links: Mapping[str, Link]) -> None:
    for name in names:
        if name is not None and name not in links:
            raise ConfigError(
                f"a device names the {what} {name!r}, which the cluster does not have",
                hint=did_you_mean(name, links, f"give that {what} a link"),
            )
