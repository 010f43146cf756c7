"""How good is what a user is told before a run? Forecasts against measured steps, several times over.

    python bench/forecast.py [--runs 5] [--steps 40] [--only wide] [--without-compile]
    python bench/forecast.py --default-job [--runs 3] [--steps 400]

For the default job and for `model.width=512`: what `pipeloom plan` predicts (and what the ops of its profile
make alone: `ops_alone`), what `pipeloom train` forecasts before its first step, and what `pipeloom bench`
predicts, each against the middle step of its own run (plans: of the train run beside them). `train` also with
`pipeline.compile`: the step's time, and all the time that is not steps. Runs of one round follow each other,
so that all see the same machine. It wants two quiet cores: the load is in the table.

With --default-job: `pipeloom train` as a newcomer starts it, several times over: time, validation loss,
predicted against measured step and memory. Memory is predicted before the run. The step is predicted again
and again between steps, from the ranks' actions timed alone, and held against the steps around it; the error
of a run is that of the middle rehearsal. A command that fails ends the benchmark with what it said.
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
from typing import Any

from machine import print_stamp, print_table

LIMIT = 0.05
MEMORY_LIMIT, TIME_LIMIT_S = 0.03, 180.0
"""Of the default job."""

REHEARSALS = ("--set", "rehearsals=21")
"""Of which the middle one counts."""

WIDTHS = {"default": 128, "wide": 512}
JOB = """from pipeloom.train.config import Config, ModelConfig
from pipeloom.train.workload import job_of


def job():
    return job_of(Config(model=ModelConfig(width={width})))
"""


class RunFailed(Exception):
    """A command ended with another status than 0."""


def pipeloom(folder: Path, *words: str) -> dict[str, Any]:
    """What a command prints with --json. Raises: RunFailed with everything that it printed."""
    command = [sys.executable, "-m", "pipeloom", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def train(folder: Path, width: int, steps: int, *, compiled: bool) -> dict[str, float]:
    """One run: seconds forecast and of the middle step, the errors, and how long all took that is no step."""
    settings = (f"model.width={width}", f"pipeline.compile={str(compiled).lower()}", "validation_batches=1")
    flags = [*REHEARSALS, *(word for setting in settings for word in ("--set", setting))]
    out = f"run-{compiled}"
    start = time.time()
    figures = pipeloom(folder, "train", "--steps", str(steps), "--out", out, *flags)
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    taken_s = sum(line.get("step_s", 0.0) for line in lines)
    return {
        "forecast_s": figures["forecast"]["step_s"],
        "middle_s": figures["middle_step_s"],
        "forecast_error": figures["forecast_error"],
        "rehearsal_error": figures["step_error"],
        "all_but_steps_s": round(time.time() - start - taken_s, 1),
    }


def one_round(name: str, steps: int, *, compile_too: bool) -> dict[str, Any]:
    """All commands once, for one width."""
    width = WIDTHS[name]
    with tempfile.TemporaryDirectory(prefix="pipeloom-forecast-") as text:
        folder = Path(text)
        (folder / "sized.py").write_text(JOB.format(width=width))
        start = time.time()
        planned = pipeloom(folder, "plan", "sized.py:job", "--no-what-if")
        plan_s = time.time() - start
        eager = train(folder, width, steps, compiled=False)
        timed = pipeloom(folder, "bench", "sized.py:job", "--steps", str(max(6, steps // 2)))
        row: dict[str, Any] = {
            "job": name,
            "load": round(os.getloadavg()[0], 2),
            "plan_error": planned["predicted_step_s"] / eager["middle_s"] - 1,
            "plan_by": planned["predicted_by"],
            "plan_took_s": round(plan_s, 1),
            "ops_alone": planned["profiled_step_s"] / eager["middle_s"] - 1,
            "train": eager,
            "bench_error": timed["predicted_step_s"] / timed["step_s"] - 1,
            "bench_step_s": timed["step_s"],
        }
        if compile_too:
            compiled = train(folder, width, steps, compiled=True)
            row["compiled"] = compiled
            row["compiled_share"] = compiled["middle_s"] / eager["middle_s"]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The middle of all rounds of one job."""
    found = {
        "plan_error": [row["plan_error"] for row in rows],
        "ops_alone": [row["ops_alone"] for row in rows if "ops_alone" in row],
        "train_error": [row["train"]["forecast_error"] for row in rows],
        "bench_error": [row["bench_error"] for row in rows],
        "rehearsal_error": [row["train"]["rehearsal_error"] for row in rows],
        "compiled_error": [row["compiled"]["forecast_error"] for row in rows if "compiled" in row],
        "compiled_share": [row["compiled_share"] for row in rows if "compiled" in row],
    }
    return {key: statistics.median(values) for key, values in found.items() if values}


def main(runs: int, steps: int, names: list[str], *, compile_too: bool) -> int:
    """Each round asks all jobs in turn."""
    print_stamp()
    rounds: list[dict[str, Any]] = []
    for _ in range(runs):
        for name in names:
            rounds.append(one_round(name, steps, compile_too=compile_too))
    print_table(rounds, "Rounds")
    middle = {name: summary([row for row in rounds if row["job"] == name]) for name in names}
    print_table([{"job": name, **figures} for name, figures in middle.items()], "Middle of the rounds")
    errors = (abs(figures[key]) for figures in middle.values() for key in figures if key.endswith("_error"))
    return 0 if max(errors) <= LIMIT else 1


def default_run(folder: Path, steps: int) -> dict[str, Any]:
    """Train the default job once; the figures of its summary, with the wall time and the errors."""
    start = time.perf_counter()
    figures = pipeloom(folder, "train", "--steps", str(steps), "--out", "run", *REHEARSALS)
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
        "load": round(os.getloadavg()[0], 2),
    }


def default_runs(runs: int, steps: int) -> int:
    rows = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(default_run(Path(folder), steps))
    step_errors = [abs(row["step_error"]) for row in rows]
    median, largest = statistics.median(step_errors), max(step_errors)
    largest_peak = max(abs(error) for row in rows for error in row["peak_errors"])
    print_stamp()
    print_table(rows)
    print(
        f"step time: median error {median:.1%}, largest {largest:.1%}; "
        f"peak memory: largest error {largest_peak:.1%}"
    )
    in_time = max(row["wall_s"] for row in rows) <= TIME_LIMIT_S
    return 0 if largest <= LIMIT and largest_peak <= MEMORY_LIMIT and in_time else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--default-job", action="store_true", help="runs of the default job instead")
    parser.add_argument("--runs", type=int, help="5, of the default job 3")
    parser.add_argument("--steps", type=int, help="40, of the default job 400")
    parser.add_argument("--only", choices=tuple(WIDTHS), action="append")
    parser.add_argument("--without-compile", action="store_true")
    options = parser.parse_args()
    try:
        if options.default_job:
            sys.exit(default_runs(options.runs or 3, options.steps or 400))
        names = options.only or list(WIDTHS)
        compile_too = not options.without_compile
        sys.exit(main(options.runs or 5, options.steps or 40, names, compile_too=compile_too))
    except RunFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(2)
