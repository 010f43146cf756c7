"""Links of parallel pipelines: how fast values cross between stages, and sums go round among replicas.

With width w, replica r of stage s is on rank s * w + r, so that the replicas of a stage are neighbours
(PipeDream-2BW, arXiv 2006.09503, section 3.3: sums of gradients stay within a node, activations go between).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..ir.cluster import Cluster
from .stage_cost.arrays import Array, Indices


@dataclass(frozen=True)
class WideLinks:
    """By [width, depth], the latency and the seconds per byte of the slowest link that is used; 0 where none
    is.

    across: between neighbouring stages, where all pipelines of a node share its network link.
    around: the ring of a stage's replicas.
    """

    across: tuple[Array, Array]
    around: tuple[Array, Array]


def wide_links(cluster: Cluster) -> WideLinks:
    """Those of a cluster, for every width and depth that it has devices for.

    >>> from ..ir.cluster import Device, Link
    >>> devices = tuple(Device(name="any", memory_bytes=1, node=node) for node in (0, 0, 1, 1))
    >>> fast, slow = Link(bandwidth_bytes_per_s=10.0), Link(bandwidth_bytes_per_s=1.0)
    >>> links = wide_links(Cluster(devices=devices, within_node=fast, between_nodes=slow))
    >>> links.around[1][2, 2].item(), links.across[1][2, 2].item()  # two stages, one in each node
    (0.1, 1.0)
    """
    count = len(cluster.devices)
    pace = _Pace(cluster)
    tables = [np.zeros((count + 1, count + 1)) for _ in range(4)]
    for width in range(1, count + 1):
        depth = count // width
        ranks = np.arange(width * depth).reshape(depth, width)
        if depth > 1:
            flows = min(width, pace.most_in_a_node)
            for table, each in zip(tables[:2], pace.of(ranks[:-1], ranks[1:], flows), strict=True):
                table[width, 2 : depth + 1] = np.maximum.accumulate(each.max(axis=1))
        if width > 1:
            for table, each in zip(tables[2:], pace.of(ranks, np.roll(ranks, -1, axis=1), 1), strict=True):
                table[width, 1 : depth + 1] = np.maximum.accumulate(each.max(axis=1))
    return WideLinks(across=(tables[0], tables[1]), around=(tables[2], tables[3]))


class _Pace:
    """Latency and seconds per byte between any two ranks, as `Cluster.link` says it of one pair."""

    def __init__(self, cluster: Cluster) -> None:
        names = {name: number for number, name in enumerate(cluster.groups)}
        self.group = np.array([-1 if d.group is None else names[d.group] for d in cluster.devices])
        self.node = np.array([d.node for d in cluster.devices])
        self.most_in_a_node = max(Counter(d.node for d in cluster.devices).values())
        links = [*cluster.groups.values(), cluster.within_node]
        self.within = len(links) - 1
        if cluster.between_nodes is not None:
            links.append(cluster.between_nodes)
        self.latency_s = np.array([link.latency_s for link in links])
        self.s_per_byte = np.array([1 / link.bandwidth_bytes_per_s for link in links])
        self.between = len(links) - 1
        shared = cluster.node_link
        self.shared_s_per_byte = 0.0 if shared is None else 1 / shared.bandwidth_bytes_per_s

    def of(self, a: Indices, b: Indices, flows: int) -> tuple[Array, Array]:
        """flows: messages that leave a node at once, and share its network link."""
        grouped = (self.group[a] == self.group[b]) & (self.group[a] >= 0)
        inside = self.node[a] == self.node[b]
        link = np.where(grouped, self.group[a], np.where(inside, self.within, self.between))
        crossing = ~grouped & ~inside
        s_per_byte = self.s_per_byte[link]
        shared = np.maximum(s_per_byte, flows * self.shared_s_per_byte)
        return self.latency_s[link], np.where(crossing, shared, s_per_byte)
