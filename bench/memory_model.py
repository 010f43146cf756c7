"""The planner's predicted peak of every stage against the ledger of a run, over model families.

    python bench/memory_model.py [--families gpt2 bert llama t5 mixtral convnet gpt] [--stages 2 3 4]

Plans of 2 to 4 stages; GPipe, 1F1B and, with split backwards, ZB-H1; 4 micro-batches of 2 rows; costs from
the roofline model.
Each stage's error is (predicted - measured) / measured. Written to bench/results/memory_model.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import ledgers  # noqa: E402
import runs  # noqa: E402
import zoo  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "memory_model.json"
FAMILIES = (*zoo.FAMILIES, "gpt")
SCHEDULES = ("gpipe", "1f1b", "zb_h1")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per family."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows):
        errors = [row["error"] for row in rows if row["family"] == family]
        lines.append(
            {
                "family": family,
                "stages": len(errors),
                "least": min(errors),
                "most": max(errors),
                "mean_absolute": sum(map(abs, errors)) / len(errors),
                "within_3_percent": sum(abs(e) <= 0.03 for e in errors),
            }
        )
    return lines


def main(families: list[str], counts: list[int]) -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with runs.shared_captures():
        for family, stages, schedule in product(families, counts, SCHEDULES):
            for stage, peaks in enumerate(ledgers.compare(zoo.job(family), stages, schedule)):
                rows.append(
                    {
                        "family": family,
                        "stages": stages,
                        "schedule": schedule,
                        "stage": stage,
                        "error": peaks.error,
                        "predicted": asdict(peaks.predicted),
                        "measured": dict(peaks.measured),
                    }
                )
            found = {"machine": describe_machine(), "summary": summary(rows), "rows": rows}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for line in summary(rows):
        print(
            f"{line['family']:<10} {line['within_3_percent']:>3} of {line['stages']:>3} within 3 %, "
            f"{line['least']:+.3f} to {line['most']:+.3f}, mean {line['mean_absolute']:.4f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--stages", nargs="*", type=int, default=[2, 3, 4])
    given = parser.parse_args()
    main(given.families, given.stages)
