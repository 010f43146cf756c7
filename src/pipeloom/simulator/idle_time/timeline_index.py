"""Happened: what a timeline holds, sorted for looking up what something waited for."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from ...ir.timeline import Timeline
from ..event_array import Listed, Spans
from .items import Item, Key

COPY_STREAMS = ("d2h", "h2d")
Times: TypeAlias = tuple[float, float]
"""Start and end in seconds."""


class Happened:
    """A timeline read once.

    rows: per rank its compute actions in order.  made: the same by text and turn.
    moved: messages on their way, by the text of their SEND.  waited: receives that waited.
    away: copies to the host and back, with their rank and stream.  beside: per rank what operations do beside
    computing.  sums: per rank its sums over ranks.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.rows: list[list[Item]] = [[] for _ in range(timeline.ranks)]
        self.made: dict[Key, Item] = {}
        self.moved: dict[Key, Times] = {}
        self.waited: dict[Key, Times] = {}
        self.away: dict[Key, tuple[int, str, Times]] = {}
        self.beside: list[list[Item]] = [[] for _ in range(timeline.ranks)]
        self.sums: list[list[Item]] = [[] for _ in range(timeline.ranks)]
        once = isinstance(timeline.events, Spans)  # the simulator runs each instruction once
        turns: Counter[tuple[str, int, str]] = Counter()
        for stream, rank, text, start_s, end_s in zip(*_listed(timeline), strict=True):
            turn = 0
            if not once:
                turn = turns[stream, rank, text]
                turns[stream, rank, text] += 1
            if stream == "compute":
                row = self.rows[rank]
                self.made[text, turn] = item = Item("compute", rank, text, turn, start_s, end_s, len(row))
                row.append(item)
            elif stream == "send" and "SEND" in text:
                self.moved[text, turn] = start_s, end_s
            elif stream in COPY_STREAMS:
                self.away[text, turn] = rank, stream, (start_s, end_s)
            elif stream in ("send", "host"):
                self.beside[rank].append(Item("copy", rank, text, 0, start_s, end_s, 0))
            elif "RECV" in text:
                self.waited[text, turn] = start_s, end_s
            elif text not in ("END", "ROOM"):
                self.sums[rank].append(Item("reduce", rank, text, 0, start_s, end_s, 0))


def _listed(timeline: Timeline) -> Listed:
    events = timeline.events
    if isinstance(events, Spans):
        return events.listed()
    found = sorted(events, key=lambda e: (e.start_s, e.end_s))
    return Listed(
        streams=[e.stream for e in found],
        ranks=[e.rank for e in found],
        actions=[e.action for e in found],
        starts=[e.start_s for e in found],
        ends=[e.end_s for e in found],
    )
