import json
from pathlib import Path
from typing import Any

from pipeloom.ir.timeline import Timeline
from pipeloom.viewer.chrome import chrome_trace, write_trace


def of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == phase]


def test_every_event_is_a_range_with_its_name_and_times(two_ranks: Timeline) -> None:
    ranges = of(chrome_trace([two_ranks]), "X")
    assert len(ranges) == len(two_ranks.events)
    backward = next(e for e in ranges if e["name"] == "PP:0B1")
    assert backward == {
        "ph": "X",
        "name": "PP:0B1",
        "cat": "B",
        "pid": 0,
        "tid": 0,
        "ts": 7e6,
        "dur": 2e6,
        "args": {"stage": 0, "microbatch": 1, "meaning": "stage 0: backward of micro-batch 1"},
    }


def test_ranks_are_processes_and_streams_are_threads(two_ranks: Timeline) -> None:
    trace = chrome_trace([two_ranks])
    names = [(e["name"], e["pid"], e.get("tid"), e["args"].get("name")) for e in of(trace, "M")]
    assert ("process_name", 0, None, "predicted rank 0") in names
    assert ("process_name", 1, None, "predicted rank 1") in names
    assert ("thread_name", 0, 1, "recv") in names
    assert ("thread_name", 1, 1, "recv") not in names
    (wait,) = [e for e in of(trace, "X") if e["cat"] == "wait"]
    assert (wait["pid"], wait["tid"]) == (0, 1)


def test_memory_is_a_counter(two_ranks: Timeline) -> None:
    counters = of(chrome_trace([two_ranks]), "C")
    assert [(e["name"], e["pid"], e["ts"], e["args"]["bytes"]) for e in counters] == [
        ("device memory", 0, 0.0, 10 * 1024**2),
        ("device memory", 0, 1e6, 30 * 1024**2),
        ("device memory", 0, 9e6, 10 * 1024**2),
    ]


def test_two_timelines_do_not_share_processes(two_ranks: Timeline, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [two_ranks, two_ranks])
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {e["pid"] for e in of(trace, "X")} == {0, 1, 2, 3}
    assert trace["displayTimeUnit"] == "ms"
