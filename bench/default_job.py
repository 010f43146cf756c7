"""The main job several times over: time, validation loss, predicted against measured step and memory.

    python bench/default_job.py [--runs 3] [--steps 400]

Each run is `pipeloom train` as a newcomer starts it, in a folder of its own. Memory is predicted before the
run. The step time is predicted again and again between steps, from the ranks' actions timed alone, and held
against the steps around it; a run's error is that of the middle rehearsal. A run that fails ends the
benchmark with what the run said. Results: bench/results/default_job.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "default_job.json"
STEP_LIMIT, MEMORY_LIMIT, TIME_LIMIT_S = 0.05, 0.03, 180.0


class RunFailed(Exception):
    """A run ended with another status than 0."""


def one_run(folder: Path, steps: int) -> dict[str, object]:
    """Train once; `summary.json` with the wall time and the errors beside it.

    Raises: RunFailed with everything that the run printed.
    """
    command = [sys.executable, "-m", "pipeloom", "train", "--json", "--steps", str(steps), "--out", "run"]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        printed = done.stdout + done.stderr
        raise RunFailed(f"{' '.join(command)} ended with status {done.returncode}:\n{printed}")
    figures = json.loads(done.stdout)
    peaks = zip(figures["predicted"]["peak_bytes"], figures["measured"]["peak_bytes"], strict=True)
    return {
        "wall_s": round(time.perf_counter() - start, 1),
        "validation_loss": figures["validation_loss"],
        "predicted_step_s": figures["predicted"]["step_s"],
        "measured_step_s": figures["measured"]["step_s"],
        "forecast_step_s": figures["forecast"]["step_s"],
        "step_error": figures["step_error"],
        "step_error_quartiles": figures["step_error_quartiles"],
        "rehearsals": len(figures["rehearsals"]),
        "peak_bytes": figures["measured"]["peak_bytes"],
        "peak_errors": [guess / real - 1 for guess, real in peaks],
    }


def main(runs: int, steps: int) -> int:
    machine = describe_machine()
    rows = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            row = one_run(Path(folder), steps)
        rows.append(row | {"load": round(os.getloadavg()[0], 2)})
        print(json.dumps(rows[-1]), flush=True)
    table = {
        "machine": machine,
        "steps": steps,
        "runs": rows,
        "median_step_error": statistics.median(abs(row["step_error"]) for row in rows),
        "largest_step_error": max(abs(row["step_error"]) for row in rows),
        "largest_peak_error": max(abs(error) for row in rows for error in row["peak_errors"]),
    }
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    within = table["largest_step_error"] <= STEP_LIMIT and table["largest_peak_error"] <= MEMORY_LIMIT
    print(
        f"step time: median error {table['median_step_error']:.1%}, largest "
        f"{table['largest_step_error']:.1%}; peak memory: largest error {table['largest_peak_error']:.1%}"
    )
    return 0 if within and max(row["wall_s"] for row in rows) <= TIME_LIMIT_S else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    try:
        sys.exit(main(options.runs, options.steps))
    except RunFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(2)
