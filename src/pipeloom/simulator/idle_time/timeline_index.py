"""Timeline index: the spans of a timeline, sorted for looking up what something waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...ir.timeline import Timeline
from ..timeline_events import EventLists, SimulatedEvents

Key: TypeAlias = tuple[str, int]
"""(an instruction's text, how often it came before): a step may run a program several times."""


@dataclass(slots=True, eq=False)  # looked up very often, and each is made once; not frozen, as that is slow
class TimedSpan:
    """Something that took time: an action, a message on its way, a sum over ranks, a copy.

    place: which of its rank's compute actions it is; of a message, the place of the action that waits; of a
        copy, how many compute actions stand in front of it.
    waiting: of something that holds a shared link, the message or copy that waits for it; then it ends when
        it lets go of the link.
    """

    kind: Literal["compute", "transfer", "reduce", "copy"]
    rank: int
    action: str
    repeat: int
    start_s: float
    end_s: float
    place: int
    to_rank: int = -1
    waiting: str = ""


class SpansByEnd:
    """Spans to be found by their end."""

    def __init__(self, spans: Iterable[TimedSpan]) -> None:
        self._spans = sorted(spans, key=lambda i: i.end_s)
        self._ends = [i.end_s for i in self._spans]

    def until(self, at_s: float, *, most: int | None = None) -> TimedSpan | None:
        """The last one that took time and ended by `at_s`; `most`: of the first so many."""
        place = bisect_right(self._ends, at_s, hi=most)
        while place:
            place -= 1
            if self._spans[place].end_s > self._spans[place].start_s:
                return self._spans[place]
        return None


COPY_STREAMS = ("d2h", "h2d")
Times: TypeAlias = tuple[float, float]
"""Start and end in seconds."""


class TimelineIndex:
    """A timeline read once.

    rows: per rank its compute actions in order.  computed: the same by text and repeat.
    sent: messages on their way, by the text of their SEND.  received: receives that waited.
    copies: to the host and back, with their rank and stream.  beside: per rank what operations do beside
    computing.  sums: per rank its sums over ranks.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.rows: list[list[TimedSpan]] = [[] for _ in range(timeline.ranks)]
        self.computed: dict[Key, TimedSpan] = {}
        self.sent: dict[Key, Times] = {}
        self.received: dict[Key, Times] = {}
        self.copies: dict[Key, tuple[int, str, Times]] = {}
        self.beside: list[list[TimedSpan]] = [[] for _ in range(timeline.ranks)]
        self.sums: list[list[TimedSpan]] = [[] for _ in range(timeline.ranks)]
        once = isinstance(timeline.events, SimulatedEvents)  # the simulator runs each instruction once
        repeats: Counter[tuple[str, int, str]] = Counter()
        for stream, rank, text, start_s, end_s in zip(*_listed(timeline), strict=True):
            repeat = 0
            if not once:
                repeat = repeats[stream, rank, text]
                repeats[stream, rank, text] += 1
            if stream == "compute":
                row = self.rows[rank]
                item = TimedSpan("compute", rank, text, repeat, start_s, end_s, len(row))
                self.computed[text, repeat] = item
                row.append(item)
            elif stream == "send" and "SEND" in text:
                self.sent[text, repeat] = start_s, end_s
            elif stream in COPY_STREAMS:
                self.copies[text, repeat] = rank, stream, (start_s, end_s)
            elif stream in ("send", "host"):
                self.beside[rank].append(TimedSpan("copy", rank, text, 0, start_s, end_s, 0))
            elif "RECV" in text:
                self.received[text, repeat] = start_s, end_s
            elif text not in ("END", "ROOM"):
                self.sums[rank].append(TimedSpan("reduce", rank, text, 0, start_s, end_s, 0))


def _listed(timeline: Timeline) -> EventLists:
    events = timeline.events
    if isinstance(events, SimulatedEvents):
        return events.listed()
    ordered = sorted(events, key=lambda e: (e.start_s, e.end_s))
    return EventLists(
        streams=[e.stream for e in ordered],
        ranks=[e.rank for e in ordered],
        actions=[e.action for e in ordered],
        starts=[e.start_s for e in ordered],
        ends=[e.end_s for e in ordered],
    )
