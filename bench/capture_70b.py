"""Capture a 70B-parameter Llama configuration on fake tensors: time, peak memory, size as JSON.

    python bench/capture_70b.py            sequence lengths 128 and 2048, each in a process of its own
    python bench/capture_70b.py --length 512 --layers 8

Results are written to bench/results/capture_70b.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from machine import describe_machine

LIMIT_S, LIMIT_BYTES = 120.0, 4 * 1024**3


def measure(layers: int, length: int) -> dict[str, object]:
    """Capture once in this process. Peak memory is the process's, PyTorch itself included."""
    from llama_70b import job

    from pipeloom import capture
    from pipeloom.ir.graph import OpGraph
    from pipeloom.ir.json_codec import from_json, to_json

    start = time.perf_counter()
    captured = capture(job(layers=layers, length=length), 1)
    captured_s = time.perf_counter() - start
    text = to_json(captured.graph)
    serialised_s = time.perf_counter() - start - captured_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert from_json(text, OpGraph, what="the graph") == captured.graph
    return {
        "layers": layers,
        "length": length,
        "ops": len(captured.graph.ops),
        "parameters": sum(p.bytes for p in captured.graph.parameters) // 4,
        "capture_s": round(captured_s, 1),
        "serialise_s": round(serialised_s, 2),
        "json_bytes": len(text),
        "peak_bytes": peak,
        "fallback": captured.graph.fallback,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--length", type=int, help="measure one sequence length in this process; print JSON")
    options = parser.parse_args()
    if options.length:
        print(json.dumps(measure(options.layers, options.length)))
        return 0
    machine = describe_machine()
    runs = []
    for length in (128, 2048):
        call = [sys.executable, __file__, "--layers", str(options.layers), "--length", str(length)]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(
            f"length {length}: {runs[-1]['ops']} ops, captured in {runs[-1]['capture_s']} s, "
            f"peak {runs[-1]['peak_bytes'] / 2**30:.2f} GiB, JSON {runs[-1]['json_bytes'] / 2**20:.1f} MiB"
        )
    kept = all(r["capture_s"] < LIMIT_S and r["peak_bytes"] < LIMIT_BYTES for r in runs)
    limits = {"seconds": LIMIT_S, "bytes": LIMIT_BYTES, "kept": kept}
    target = Path(__file__).parent / "results" / "capture_70b.json"
    target.write_text(json.dumps({"machine": machine, "limits": limits, "runs": runs}, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
