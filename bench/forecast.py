"""How good is what a user is told before a run? Forecasts against measured steps, several times over.

    python bench/forecast.py [--runs 5] [--steps 40] [--only wide]

For the default job and for `model.width=512`: what `pipeloom plan` predicts (and what the ops of its profile
make alone: `ops_alone`), what `pipeloom train` forecasts before its first step, and what `pipeloom bench`
predicts, each against the middle step of its own run (plans: of the train run beside them). Runs of one round
follow each other, so that all see the same machine. It wants two quiet cores: the load is in the table.

"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import parser_of, print_stamp, print_table, run_python

LIMIT = 0.05
WIDTHS = {"default": 128, "wide": 512}
JOB = """from pipeloom.train.config import Config, ModelConfig
from pipeloom.train.workload import job_of


def job():
    return job_of(Config(model=ModelConfig(width={width})))
"""


def pipeloom(folder: Path, *words: str) -> dict[str, Any]:
    """What a command prints with --json."""
    figures: dict[str, Any] = json.loads(run_python("-m", "pipeloom", *words, "--json", cwd=folder).stdout)
    return figures


def one_round(name: str, steps: int) -> dict[str, Any]:
    """All commands once, for one width: relative errors."""
    width = WIDTHS[name]
    with tempfile.TemporaryDirectory(prefix="pipeloom-forecast-") as text:
        folder = Path(text)
        (folder / "sized.py").write_text(JOB.format(width=width))
        planned = pipeloom(folder, "plan", "sized.py:job", "--no-what-if")
        settings = ("--set", f"model.width={width}", "--set", "validation_batches=1")
        trained = pipeloom(folder, "train", "--steps", str(steps), "--out", "run", *settings)
        timed = pipeloom(folder, "bench", "sized.py:job", "--steps", str(max(6, steps // 2)))
        middle_s = trained["middle_step_s"]
        return {
            "job": name,
            "load": round(os.getloadavg()[0], 2),
            "plan_by": planned["predicted_by"],
            "plan_error": planned["predicted_step_s"] / middle_s - 1,
            "ops_alone": planned["profiled_step_s"] / middle_s - 1,
            "train_error": trained["forecast_error"],
            "bench_error": timed["predicted_step_s"] / timed["step_s"] - 1,
            "middle_s": middle_s,
            "bench_step_s": timed["step_s"],
        }


def main(runs: int, steps: int, names: list[str]) -> int:
    """Each round asks all jobs in turn."""
    print_stamp()
    rounds = []
    for _ in range(runs):
        for name in names:
            rounds.append(one_round(name, steps))
            print(json.dumps(rounds[-1]), flush=True)
    print_table(rounds, "Rounds")
    keys = ("plan_error", "ops_alone", "train_error", "bench_error")
    middle = [
        {"job": name} | {key: statistics.median(r[key] for r in rounds if r["job"] == name) for key in keys}
        for name in names
    ]
    print_table(middle, "Middle of the rounds")
    errors = [abs(row[key]) for row in middle for key in keys if key.endswith("_error")]
    return 0 if max(errors) <= LIMIT else 1


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=tuple(WIDTHS), action="append")
    given = parser.parse_args()
    sys.exit(main(given.runs, given.steps, given.only or list(WIDTHS)))
