"""How long the first plan of an installation takes, when nothing is compiled yet, and how long the next.

A 70B-parameter Llama on 64 devices, at op granularity, by `dawnpiper`: captured on fake tensors, costs by
roofline, as `pipeloom plan --cluster` does it, with code compiled beside the capture where there is none.

    python bench/first_plan.py [--devices 64] [--layers 80] [--planner dawnpiper]

Prints a table. 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from machine import print_stamp, print_table


def measure(layers: int, devices: int, planner: str) -> dict[str, Any]:
    """Capture and plan in this process."""
    from llama_70b import job

    from pipeloom import capture
    from pipeloom.clusters.names import find_cluster
    from pipeloom.kernel_compilation import kernels_compiled_beside
    from pipeloom.planner.planners import make_plan
    from pipeloom.planner.request import PlanOptions
    from pipeloom.profiler.roofline import roofline

    begin = time.perf_counter()
    with kernels_compiled_beside(planner) as wait_for_code:
        graph = capture(job(layers=layers), 1).graph
        wait_for_code(graph)
    captured = time.perf_counter()
    cluster = find_cluster(f"{devices // 8} nodes of 8 x h100")
    plan = make_plan(
        graph,
        roofline(graph, cluster.devices[0]),
        cluster,
        ranks=devices,
        schedule="1f1b",
        microbatches=2 * devices,
        planner=planner,
        options=PlanOptions(),
    )
    end = time.perf_counter()
    return {
        "ops": len(graph.ops),
        "capture_s": round(captured - begin, 1),
        "search_s": round(end - captured, 1),
        "together_s": round(end - begin, 1),
        "predicted_step_s": plan.predicted_step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--planner", default="dawnpiper")
    parser.add_argument("--one", action="store_true", help="measure here and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.layers, options.devices, options.planner)))
        return
    rows = []
    print_stamp()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "next"):
            call = [sys.executable, __file__, *sys.argv[1:], "--one"]
            env = {**os.environ, "NUMBA_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}
            done = subprocess.run(call, env=env, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"plan": name, **json.loads(done.stdout.splitlines()[-1])})
    print_table(rows, options.planner)


if __name__ == "__main__":
    main()
