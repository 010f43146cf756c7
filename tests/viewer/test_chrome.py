import json
from pathlib import Path
from typing import Any

from pipeloom.ir.timeline import Timeline
from pipeloom.viewer.chrome import chrome_trace, write_trace


def of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == phase]


def test_ranks_are_processes_and_streams_are_threads_with_an_event_for_each_range(
    two_ranks: Timeline,
) -> None:
    trace = chrome_trace([two_ranks])
    ranges = of(trace, "X")
    assert len(ranges) == len(two_ranks.events)
    (backward,) = (e for e in ranges if e["name"] == "PP:0B1")
    args = {"stage": 0, "microbatch": 1, "meaning": "stage 0: backward of micro-batch 1"}
    times = {"ts": 7e6, "dur": 2e6}
    assert backward == {"ph": "X", "name": "PP:0B1", "cat": "B", "pid": 0, "tid": 0, **times, "args": args}
    (wait,) = (e for e in ranges if e["cat"] == "wait")
    assert (wait["pid"], wait["tid"]) == (0, 1)
    names = {(e["name"], e["pid"], e.get("tid"), e["args"].get("name")) for e in of(trace, "M")}
    assert {("process_name", rank, None, f"predicted rank {rank}") for rank in range(2)} <= names
    assert ("thread_name", 0, 1, "recv") in names and ("thread_name", 1, 1, "recv") not in names
    held = [(e["name"], e["pid"], e["ts"], e["args"]["bytes"]) for e in of(trace, "C")]
    curve = ((0.0, 10), (1e6, 30), (9e6, 10))
    assert held == [("device memory", 0, at, size * 1024**2) for at, size in curve]


def test_two_timelines_do_not_share_processes(two_ranks: Timeline, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [two_ranks, two_ranks])
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {e["pid"] for e in of(trace, "X")} == {0, 1, 2, 3}
    assert trace["displayTimeUnit"] == "ms"
