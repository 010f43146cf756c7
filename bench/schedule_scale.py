"""How schedules grow: generate, check, lower and simulate 1F1B of four sizes, each in a process of its own.

For each size: seconds of each step, peak resident memory of the process, and compute actions per second of
the simulator, when its kernels have just been loaded and then again (warm: with the memory of the first
timeline, as where many are simulated in a row). A small run before fills the cache of compiled code, so that
no size pays for compiling.

    python bench/schedule_scale.py [--ranks 128 256 512 1024] [--per-rank 8]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from machine import describe_machine

from pipeloom import schedules
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.stages import chain
from pipeloom.lowering import lower
from pipeloom.simulator import simulate, summarise

RESULTS = Path(__file__).parent / "results"
T = TypeVar("T")


def measure(ranks: int, microbatches: int) -> dict[str, Any]:
    """One size, in this process."""
    took: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        begin, cpu = time.perf_counter(), time.process_time()
        made = work()
        took[f"{name}_s"] = round(time.perf_counter() - begin, 3)
        took[f"{name}_cpu_s"] = round(time.process_time() - cpu, 3)
        return made

    stages, placement = chain(ranks), tuple(range(ranks))
    costs = equal_costs(ranks, residual_bytes=1 << 20)
    device = Device(name="any", memory_bytes=1 << 40)
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.01)
    cluster = Cluster(devices=(device,) * ranks, within_node=link)
    begin = time.perf_counter()
    made = timed("generate_and_check", lambda: schedules.build("1f1b", stages, placement, microbatches))
    program = timed("check_and_lower", lambda: lower(made, stages))

    def simulated() -> tuple[float, float]:
        timeline = timed("simulate", lambda: simulate(program, stages, costs, cluster))
        summary = timed("summarise", lambda: summarise(timeline))
        return summary.step_s, summary.bubble

    step_s, bubble = simulated()
    total_s = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    timed("simulate_warm", lambda: simulate(program, stages, costs, cluster))
    actions = len(made.columns)
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "compute_actions": actions,
        "instructions": len(program.columns),
        **took,
        "total_s": round(total_s, 2),
        "peak_gib": round(peak / 2**30, 2),
        "step_s": step_s,
        "bubble": bubble,
        "actions_per_s_warm": round(actions / took["simulate_warm_s"]),
        "actions_per_cpu_s_warm": round(actions / took["simulate_warm_cpu_s"]),
    }


def apart(ranks: int, microbatches: int) -> dict[str, Any]:
    """One size, in a process of its own."""
    command = [sys.executable, __file__, "--one", str(ranks), str(microbatches)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--per-rank", type=int, default=8, help="micro-batches per rank")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    apart(64, 512)
    lines = []
    for ranks in args.ranks:
        line = apart(ranks, args.per_rank * ranks)
        lines.append(line)
        print(
            f"p={ranks:<5} m={line['microbatches']:<6} {line['compute_actions'] / 1e6:6.2f} M actions: "
            f"{line['total_s']:6.2f} s, {line['peak_gib']:.2f} GiB; warm simulator "
            f"{line['actions_per_s_warm'] / 1e6:.2f} M actions/s "
            f"({line['actions_per_cpu_s_warm'] / 1e6:.2f} M per second of processor time)"
        )
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": describe_machine(), "lines": lines}, indent=1)
    (RESULTS / "schedule_scale.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
