"""Sums over ranks (REDUCE): how long they take, and what of them goes through the network links of nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..ir.cluster import Cluster
from ..ir.columns import Floats, Ints, Longs, starts_of
from ..ir.costs import StageCost
from ..ir.shared_weights import Reduction
from .shared_links import crosses, transfer_s

NodeLink: TypeAlias = tuple[str, int]
"""("out of" or "into", a node)."""


class AllReduces(NamedTuple):
    """The sums of a program. first: sums of rank r are `numbers[first[r] : first[r + 1]]`, in order.
    ranks, seconds: by sum, how many ranks meet, and how long it takes.  size: by sum, its bytes.
    share: by sum, 0.5 where each rank gets the sums of its own part only, else 1."""

    first: Ints
    numbers: Longs
    reductions: Sequence[Reduction]
    ranks: Ints
    seconds: Floats
    size: Sequence[int]
    share: Sequence[float]

    def repeated(self, times: int) -> AllReduces:
        """The same sums in each of several updates: number n of update u is then n + u * their count. `first`
        goes through the updates of rank 0, then through those of rank 1, and so on."""
        count, rows = len(self.reductions), np.split(self.numbers, self.first[1:-1])
        each = [row + update * count for row in rows for update in range(times)]
        return AllReduces(
            first=starts_of([len(row) for row in each]),
            numbers=np.concatenate([*each, np.zeros(0, np.int64)]),
            reductions=list(self.reductions) * times,
            ranks=np.tile(self.ranks, times),
            seconds=np.tile(self.seconds, times),
            size=list(self.size) * times,
            share=list(self.share) * times,
        )

    def links(self, cluster: Cluster) -> list[dict[NodeLink, float]]:
        """By sum, what `link_seconds` says of it, or half of that."""
        return [
            {link: share * held for link, held in link_seconds(size, reduction.ranks, cluster).items()}
            for size, share, reduction in zip(self.size, self.share, self.reductions, strict=True)
        ]


def all_reduces_of(
    rows: Sequence[Sequence[Reduction]], costs: Sequence[StageCost], cluster: Cluster, ranks: int
) -> AllReduces:
    """rows: for each rank its sums in order, see `reductions`.

    Sums of parts, each for its owner, take half as long as a sum for all: the first half of its ring.
    """
    reductions = list(dict.fromkeys(r for row in rows for r in row))
    number = {reduction: at for at, reduction in enumerate(reductions)}
    all_rows = [[number[r] for r in row] for row in (*rows, *((),) * (ranks - len(rows)))]
    size = [
        sum(max(costs[stage].tied_bytes.get(name, 0) for stage in r.stages) for name in r.names)
        for r in reductions
    ]
    owned = [frozenset[str]().union(*(costs[stage].for_owners for stage in r.stages)) for r in reductions]
    share = [
        0.5 if r.names and names.issuperset(r.names) else 1.0
        for r, names in zip(reductions, owned, strict=True)
    ]
    seconds = [
        part * all_reduce_s(n, r.ranks, cluster) for part, n, r in zip(share, size, reductions, strict=True)
    ]
    return AllReduces(
        first=starts_of([len(row) for row in all_rows]),
        numbers=np.array([n for row in all_rows for n in row], np.int64),
        reductions=reductions,
        ranks=np.array([len(r.ranks) for r in reductions], np.int32),
        seconds=np.array(seconds, np.float64),
        size=size,
        share=share,
    )


def all_reduce_s(size: int, ranks: tuple[int, ...], cluster: Cluster) -> float:
    """Seconds for the sum of `size` bytes over `ranks` if nothing else is on its way.

    It is a ring, at the pace of the slowest link: each of n ranks passes on 2 (n - 1) pieces of size / n;
    where several of its links leave one node, not faster than the node's network link.
    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations".
    """
    count = len(ranks)
    if count < 2:
        return 0.0
    piece = -(-size // count)
    paced = 2 * (count - 1) * max(transfer_s(cluster, a, b, piece) for a, b in _ring(ranks))
    return max([paced, *link_seconds(size, ranks, cluster).values()])


def all_gather_s(size: int, ranks: tuple[int, ...], cluster: Cluster) -> float:
    """Seconds until each of `ranks` has all of `size` bytes, of which each had about an even share: the
    second half of the ring that `all_reduce_s` is. Nothing else is on its way.

    >>> from ..ir.cluster import Device, Link
    >>> device = Device(name="any", memory_bytes=1)
    >>> cluster = Cluster(devices=(device,) * 2, within_node=Link(bandwidth_bytes_per_s=4.0))
    >>> all_gather_s(8, (0, 1), cluster), all_reduce_s(8, (0, 1), cluster)
    (1.0, 2.0)
    """
    return all_reduce_s(size, ranks, cluster) / 2


def link_seconds(size: int, ranks: tuple[int, ...], cluster: Cluster) -> dict[NodeLink, float]:
    """The network links of nodes that a sum goes through, with the seconds that its bytes take of each.

    >>> from ..ir.cluster import Device, Link
    >>> link = Link(bandwidth_bytes_per_s=4.0)
    >>> devices = tuple(Device(name="any", memory_bytes=1, node=node) for node in (0, 0, 1))
    >>> cluster = Cluster(devices=devices, within_node=link, node_link=link)
    >>> link_seconds(8, (0, 2), cluster)
    {('out of', 0): 2.0, ('into', 1): 2.0, ('out of', 1): 2.0, ('into', 0): 2.0}
    """
    seconds: dict[NodeLink, float] = defaultdict(float)
    if cluster.node_link is None or len(ranks) < 2:
        return seconds
    each = 2 * (len(ranks) - 1) * -(-size // len(ranks))
    for a, b in _ring(ranks):
        if crosses(cluster, a, b):
            for link in (("out of", cluster.devices[a].node), ("into", cluster.devices[b].node)):
                seconds[link] += each / cluster.node_link.bandwidth_bytes_per_s
    return dict(seconds)


def _ring(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
