"""Cluster: devices and the links between them. Devices may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import ConfigError

GiB = 1024**3
MiB = 1024**2

OP_CLASSES = ("matmul", "attention", "convolution", "normalisation", "elementwise", "default")
"""Classes of ops that differ in the share of the peak rate or bandwidth that they achieve."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a connection between two devices.

    latency_s, bandwidth_bytes_per_s: of a message, from the start of its send until it is there.
    overhead_s, overhead_s_per_byte: time in which a message keeps its sender, and its receiver, from
        computing.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.overhead_s < 0 or self.overhead_s_per_byte < 0:
            per_byte = self.overhead_s_per_byte
            raise ConfigError(
                f"a message occupies its ranks for {self.overhead_s} s and {per_byte} s per byte",
                hint="use at least 0",
            )
        if self.bandwidth_bytes_per_s <= 0 or self.latency_s < 0:
            raise ConfigError(
                f"link has bandwidth {self.bandwidth_bytes_per_s} B/s and latency {self.latency_s} s",
                hint="bandwidth must be above 0 and latency at least 0",
            )

    def transfer_s(self, size: int) -> float:
        """Seconds to move `size` bytes.

        >>> Link(bandwidth_bytes_per_s=1e9, latency_s=0.5).transfer_s(2_000_000_000)
        2.5
        """
        return self.latency_s + size / self.bandwidth_bytes_per_s

    def occupied_s(self, size: int) -> float:
        """Seconds for which a message keeps its sender, and its receiver, from computing: the `o` of LogP.

        Source: Culler et al. 1993, "LogP: towards a realistic model of parallel computation".
        """
        return self.overhead_s + size * self.overhead_s_per_byte


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    memory_bytes: the cap that plans keep to.
    flops_per_s: peak rate per dtype name.  memory_bytes_per_s: bandwidth of its memory.
    efficiency: op class (see `OP_CLASSES`) -> share of the peak that is achieved; classes not named use
        "default", and that is 1 if not named.
    launch_s: time that starting one kernel takes on top.
    node: index of the machine it sits in.
    host_link: link to the host's memory, if there is one to offload to.
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    node: int = 0
    host_link: Link | None = None
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigError(
                f"device {self.name} has {self.memory_bytes} bytes of memory",
                hint="give each device a positive memory size",
            )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in rank order, with a link within a node and one between nodes."""

    devices: tuple[Device, ...]
    within_node: Link
    between_nodes: Link | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("the cluster has no device", hint="add at least one")

    def link(self, a: int, b: int) -> Link:
        """The link from rank `a` to rank `b`."""
        same = self.devices[a].node == self.devices[b].node
        return self.within_node if same or self.between_nodes is None else self.between_nodes
