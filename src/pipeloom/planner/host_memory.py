"""Host memory: what the ranks of a node offload together, and what the node has for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.cluster import Cluster, Device
from ..ir.text import format_bytes
from ..ir.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class HostShortage:
    """A node whose ranks offload more than it has room for. Bytes; rank: the one that offloads most."""

    node: int
    needed: int
    room: int
    rank: int
    rank_bytes: int

    def __str__(self) -> str:
        return (
            f"the ranks of node {self.node} offload {format_bytes(self.needed)}, its host memory for them is "
            f"{format_bytes(self.room)}: rank {self.rank} alone offloads {format_bytes(self.rank_bytes)}"
        )


def host_needs(step: Timeline) -> tuple[int, ...]:
    """Per rank the most bytes that it has on the host in a simulated step: what its ledger will say."""
    return tuple(step.peak_bytes(rank, "host") for rank in range(step.ranks))


def host_shortage(needs: Sequence[int], cluster: Cluster) -> HostShortage | None:
    """The node that lacks most; None if all have room. A node has what its devices have together; one with a
    device of which nothing is known is taken to have room.

    needs: bytes of each rank.

    >>> from pipeloom.ir.cluster import Device, Link
    >>> card = Device(name="card", memory_bytes=1, host_memory_bytes=100)
    >>> two = Cluster(devices=(card, card), within_node=Link(bandwidth_bytes_per_s=1.0))
    >>> host_shortage((150, 40), two), host_shortage((150, 60), two).needed
    (None, 210)
    """
    ranks: dict[int, list[int]] = {}
    for rank, device in enumerate(cluster.devices[: len(needs)]):
        ranks.setdefault(device.node, []).append(rank)
    found = []
    for node, own in ranks.items():
        room = sum(device.host_memory_bytes for device in cluster.devices if device.node == node)
        known = all(device.host_memory_bytes for device in cluster.devices if device.node == node)
        needed = sum(needs[rank] for rank in own)
        if known and needed > room:
            most = max(own, key=lambda rank: needs[rank])
            found.append(HostShortage(node=node, needed=needed, room=room, rank=most, rank_bytes=needs[most]))
    return max(found, key=lambda shortage: shortage.needed - shortage.room, default=None)


def pair_low_with_high(cluster: Cluster) -> Cluster:
    """The same devices in another order of ranks: first and last ranks together on a node, so that all nodes
    need about as much host memory. More messages then go between nodes.

    Low ranks keep residuals longest, so they have most of them on the host.
    Source: PipeOffload (arXiv 2503.01328), which does so to even out host memory.

    >>> from pipeloom.ir.cluster import Device, Link
    >>> cards = tuple(Device(name="card", memory_bytes=1, node=node) for node in (0, 0, 1, 1))
    >>> paired = pair_low_with_high(Cluster(devices=cards, within_node=Link(bandwidth_bytes_per_s=1.0)))
    >>> [device.node for device in paired.devices]
    [0, 1, 1, 0]
    """
    low: list[Device] = []
    high: list[Device] = []
    for at, device in enumerate(sorted(cluster.devices, key=lambda device: device.node)):
        (low if at % 2 == 0 else high).append(device)
    return replace(cluster, devices=(*low, *reversed(high)))
