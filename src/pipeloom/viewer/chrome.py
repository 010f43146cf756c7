"""Timeline -> the trace-event JSON that Perfetto and chrome://tracing read.

One process per rank and timeline, one thread per stream, a range `PP:0F3` per action, one `PP:0F3&0B1` around
both of a pair, a counter per memory tier. Times are in microseconds, as the format wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..ir.text import save_noun
from ..ir.timeline import Event, Timeline
from .labels import STREAMS, label


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """
    >>> from pipeloom.ir.timeline import Event
    >>> one = Event(rank=0, stream="compute", action="0F3", start_s=0.001, end_s=0.003)
    >>> trace = chrome_trace([Timeline(source="measured", ranks=1, events=(one,))])
    >>> [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    [('PP:0F3', 1000.0, 2000.0)]
    """
    events: list[dict[str, Any]] = []
    first = 0
    for timeline in timelines:
        events += _events(timeline, first)
        first += timeline.ranks
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    save_noun(chrome_trace(timelines), path)


def _events(timeline: Timeline, first: int) -> list[dict[str, Any]]:
    """first: process id of the timeline's rank 0."""
    used = {(e.rank, e.stream) for e in timeline.events}
    others = {stream for _, stream in used} - {*STREAMS}
    threads = {stream: i for i, stream in enumerate((*STREAMS, *sorted(others)))}
    events: list[dict[str, Any]] = []

    def name(pid: int, tid: dict[str, int], **more: object) -> None:
        part = "thread" if tid else "process"
        for key, value in more.items():
            events.append({"ph": "M", "name": f"{part}_{key}", "pid": pid, "args": {key: value}, **tid})

    def add_range(text: str, kind: str, one: Event, last: Event, args: Mapping[str, object]) -> None:
        events.append(
            {
                "ph": "X",
                "name": f"PP:{text}",
                "cat": kind,
                "pid": first + one.rank,
                "tid": threads[one.stream],
                "ts": round(one.start_s * 1e6, 3),
                "dur": round((last.end_s - one.start_s) * 1e6, 3),
                "args": args,
            }
        )

    for rank in range(timeline.ranks):
        name(first + rank, {}, name=f"{timeline.source} rank {rank}", sort_index=first + rank)
        for stream, tid in threads.items():
            if (rank, stream) in used:
                name(first + rank, {"tid": tid}, name=stream, sort_index=tid)
    # Pairs come first: viewers show what lies inside under what it lies in.
    for one, other in timeline.paired:
        add_range(f"{one.action}&{other.action}", "pair", one, other, {"meaning": "a pair, run as one unit"})
    for event in timeline.events:
        what = label(event.action)
        args = {"stage": what.stage, "microbatch": what.microbatch, "meaning": what.meaning}
        add_range(event.action, what.group, event, event, args)
    for curve in timeline.memory:
        for at_s, size in zip(curve.times_s, curve.sizes, strict=True):
            events.append(
                {
                    "ph": "C",
                    "name": f"{curve.tier} memory",
                    "pid": first + curve.rank,
                    "ts": round(at_s * 1e6, 3),
                    "args": {"bytes": size},
                }
            )
    return events
