"""verify over model families, stages, schedules and kinds of backward; one table of largest differences.

    python bench/verify_families.py [--families gpt2 bert llama t5 mixtral convnet]

Each case is one training step in a pipeline of threads against one process (`pipeloom.verify`), in fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path

import torch
from machine import describe_machine

from pipeloom import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import runs, zoo  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "verify_families.json"
FAMILIES = ("gpt2", "bert", "llama", "t5", "mixtral", "convnet")


def main(families: list[str]) -> int:
    torch.set_num_threads(1)
    rows = []
    for family, stages, schedule, split in product(families, (2, 3, 4), ("gpipe", "1f1b"), (False, True)):
        job = zoo.job(family)
        plan = runs.even_plan(job, stages, schedule=schedule, microbatches=4, split=split)
        result = verify(job, plan)
        rows.append(
            {
                "family": family,
                "stages": stages,
                "schedule": schedule,
                "split_backward": split,
                "loss": result.loss,
                "gradients": max(result.gradients.values()),
                "parameters": max(result.parameters.values()),
                "passed": result.passed,
                "reference": result.reference,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    worst = max(max(row["loss"], row["gradients"], row["parameters"]) for row in rows)
    table = {"machine": describe_machine(), "tolerance": 1e-5, "worst": worst, "cases": rows}
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{sum(row['passed'] for row in rows)} of {len(rows)} passed, largest difference {worst:.2e}")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    sys.exit(main(parser.parse_args().families))
