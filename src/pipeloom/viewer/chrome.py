"""Timeline -> the trace-event JSON that Perfetto and chrome://tracing read.

One process per rank and timeline, one thread per stream, a range `PP:0F3` per action, one `PP:0F3&0B1` around
both of a pair, a counter per memory tier. Times are in microseconds, as the format wants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..ir.text import save_noun
from ..ir.timeline import Event, Timeline
from .labels import label

STREAMS = ("compute", "recv", "send", "d2h", "h2d", "host")

TraceEvent = dict[str, Any]


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace of one or more timelines, each with its own processes.

    >>> from pipeloom.ir.timeline import Event
    >>> one = Event(rank=0, stream="compute", action="0F3", start_s=0.001, end_s=0.003)
    >>> trace = chrome_trace([Timeline(source="measured", ranks=1, events=(one,))])
    >>> [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    [('PP:0F3', 1000.0, 2000.0)]
    """
    events: list[TraceEvent] = []
    first = 0
    for timeline in timelines:
        events += _processes(timeline, first)
        events += _ranges(timeline, first)
        events += _counters(timeline, first)
        first += timeline.ranks
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write the trace to a file, whole or not at all."""
    save_noun(chrome_trace(timelines), path)


def _threads(timeline: Timeline) -> dict[str, int]:
    used = {e.stream for e in timeline.events}
    return {stream: i for i, stream in enumerate((*STREAMS, *sorted(used - {*STREAMS})))}


def _processes(timeline: Timeline, first: int) -> Iterator[TraceEvent]:
    used = {(e.rank, e.stream) for e in timeline.events}
    threads = _threads(timeline)
    for rank in range(timeline.ranks):
        pid = first + rank
        yield _metadata("process_name", pid, {"name": f"{timeline.source} rank {rank}"})
        yield _metadata("process_sort_index", pid, {"sort_index": pid})
        for stream, tid in threads.items():
            if (rank, stream) in used:
                yield {**_metadata("thread_name", pid, {"name": stream}), "tid": tid}
                yield {**_metadata("thread_sort_index", pid, {"sort_index": tid}), "tid": tid}


def _metadata(name: str, pid: int, args: dict[str, object]) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "args": args}


def _ranges(timeline: Timeline, first: int) -> Iterator[TraceEvent]:
    """A range around both actions of each pair, then one for each action: viewers show what lies inside under
    what it lies in."""
    threads = _threads(timeline)

    def around(name: str, kind: str, one: Event, last: Event, args: dict[str, object]) -> TraceEvent:
        return {
            "ph": "X",
            "name": f"PP:{name}",
            "cat": kind,
            "pid": first + one.rank,
            "tid": threads[one.stream],
            "ts": round(one.start_s * 1e6, 3),
            "dur": round((last.end_s - one.start_s) * 1e6, 3),
            "args": args,
        }

    for one, other in timeline.paired:
        args: dict[str, object] = {"meaning": "a pair, run as one unit"}
        yield around(f"{one.action}&{other.action}", "pair", one, other, args)
    for event in timeline.events:
        what = label(event.action)
        args = {"stage": what.stage, "microbatch": what.microbatch, "meaning": what.meaning}
        yield around(event.action, what.group, event, event, args)


def _counters(timeline: Timeline, first: int) -> Iterator[TraceEvent]:
    for curve in timeline.memory:
        for at_s, size in zip(curve.times_s, curve.sizes, strict=True):
            yield {
                "ph": "C",
                "name": f"{curve.tier} memory",
                "pid": first + curve.rank,
                "ts": round(at_s * 1e6, 3),
                "args": {"bytes": size},
            }
