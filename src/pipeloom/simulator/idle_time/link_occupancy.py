"""Link occupancy: what a shared link carried while a message or a copy waited for it (see `shared_links`).

Links serve first what asked first, one after the other. So what a wait ends with is whatever the link served
last before: a message holds the links of both nodes for its bytes at their rate; a copy, whose bytes no
timeline tells, holds its switch until the next one begins. A sum over ranks, of which a timeline only tells
when each rank came to it and when it was done, is taken to hold its links where nothing else did.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TypeAlias

import numpy as np

from ...ir.action import REDUCE
from ...ir.cluster import Cluster
from ...ir.columns import SEND_B_, SEND_F_
from ...ir.flow import Flow
from ...ir.schedule import Program
from ...ir.stages import StageGraph
from ...ir.weights import reductions
from ..all_reduce import link_seconds
from ..layout import message_bytes
from ..shared_links import crosses
from .timeline_index import COPY_STREAMS, Key, TimedSpan, TimelineIndex, Times

Link: TypeAlias = tuple[str, int | str]
"""("out of" or "into", a node); or (a copy stream, a switch)."""
Served: TypeAlias = tuple[list[Times], list[Key]]
"""What a link served, in order: from when until when it held the link at most, and what it was."""


class LinkOccupancy:
    """Looks up what held a link. Takes time in proportion to what goes through shared links to make."""

    def __init__(
        self, program: Program, index: TimelineIndex, stages: StageGraph, flow: Flow, cluster: Cluster
    ) -> None:
        self._links: dict[str, tuple[Link, ...]] = {}
        """Message -> the shared links that it goes through."""
        self._held: dict[str, float] = {}
        """Message -> for how long it holds them, in seconds."""
        served: dict[Link, list[tuple[Times, Key]]] = defaultdict(list)
        if cluster.node_link is not None:
            self._read_routes(program, stages, flow, cluster)
            for key, (start_s, _) in index.sent.items():
                for link in self._links.get(key[0], ()):
                    served[link].append(((start_s, start_s + self._held[key[0]]), key))
        self._switch = [device.switch for device in cluster.devices]
        self._copy: dict[Key, Link] = {}
        for key, (rank, stream, times) in index.copies.items():
            if (switch := self._switch[rank]) is not None and stream in COPY_STREAMS:
                self._copy[key] = (stream, switch)
                served[stream, switch].append((times, key))
        self._served: dict[Link, Served] = {}
        for link, entries in served.items():
            entries.sort(key=lambda entry: entry[0])
            self._served[link] = [times for times, _ in entries], [key for _, key in entries]

        self._sums: list[tuple[TimedSpan, set[Link]]] = []
        """What sums over ranks there were, with the links that they go through."""
        for row, items in zip(reductions(stages, program.placement), index.sums, strict=False):
            links: set[Link] = set()
            for tie in row:
                links |= link_seconds(1, tie.ranks, cluster).keys()
            self._sums += [(item, links) for item in items if links and REDUCE in item.action]

    def _read_routes(self, program: Program, stages: StageGraph, flow: Flow, cluster: Cluster) -> None:
        assert cluster.node_link is not None
        columns, messages = program.columns, program.message_index(flow)
        sends = np.flatnonzero((columns.kind == SEND_F_) | (columns.kind == SEND_B_))
        ends = [
            (program.placement[a], program.placement[b])
            for a, b in zip(messages.routes.sender.tolist(), messages.routes.receiver.tolist(), strict=True)
        ]
        shared = np.array([crosses(cluster, a, b) for a, b in ends], np.bool_)
        sends = sends[shared[messages.route[sends]]]
        held = message_bytes(messages.routes, stages) / cluster.node_link.bandwidth_bytes_per_s
        for route, text in zip(messages.route[sends].tolist(), columns.texts(sends), strict=True):
            a, b = (cluster.devices[rank].node for rank in ends[route])
            self._links[text] = ("out of", a), ("into", b)
            self._held[text] = float(held[route])

    def summing(self, key: Key, start_s: float) -> TimedSpan | None:
        """A sum over ranks that went on until a message began, or longer, and goes through a link of it."""
        links = self._links.get(key[0], ())
        for item, held in self._sums if links else ():
            if item.start_s < start_s <= item.end_s and not held.isdisjoint(links):
                return item
        return None

    def before(self, key: Key, start_s: float, since_s: float) -> tuple[Key, float] | None:
        """What held a link of a message or copy that waited from `since_s` to `start_s`, and until when; of
        two links that which was free last. None if all of them were free."""
        copy = self._copy.get(key)
        best: tuple[Key, float] | None = None
        for link in self._links.get(key[0], ()) if copy is None else (copy,):
            times, keys = self._served[link]
            place = bisect_left(times, (start_s,)) - 1
            if place >= 0:
                until_s = min(times[place][1], start_s)
                if until_s > max(since_s, best[1] if best else since_s):
                    best = keys[place], until_s
        return best
