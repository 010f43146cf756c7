"""Do profiles of compiled functions say what compiled stages take?

    python bench/compiled.py [--widths 128 512] [--rounds 2]

For the built-in GPT: layers are compiled and timed, as for a plan with `pipeline.compile`, and planned from
that are two stages. Then these stages themselves are compiled and run, one after the other in this process,
by one thread, in turns with their eager form. Seconds of the thread's own time of one micro-batch, forward
and backward, each (eager, compiled). Results: bench/results/compiled.json. A round takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from pipeloom.api import CapturedModel, capture, compiled_profile, make_request, profile
from pipeloom.profiler import Timer, time_piece
from pipeloom.train import Config, default_job

RESULTS = Path(__file__).parent / "results" / "compiled.json"
ROWS, MICROBATCHES, STAGES, RUN_S = 4, 8, 2, 5.0


def one_width(width: int) -> dict[str, Any]:
    """What is predicted of each stage and what it takes."""
    config = Config()
    job = default_job(replace(config, model=replace(config.model, width=width)))
    captured = capture(job, ROWS)
    eager = profile(captured)
    start = time.perf_counter()
    compiled = compiled_profile(captured, eager)
    row: dict[str, Any] = {
        "width": width,
        "compiled": compiled.compiled,
        "compiling_s": round(time.perf_counter() - start, 1),
    }
    request = make_request(job, stages=STAGES, microbatches=MICROBATCHES, compiled=True)
    model = CapturedModel(size=ROWS, graph=captured.graph, profiles={"cpu": compiled}, captured=captured)
    stages = request.plan(model).stage_graph(captured.graph)
    row["stages"] = []
    for stage in stages.stages:
        costs = [[kind.costs[op] for op in stage.ops] for kind in (eager, compiled)]
        found = time_piece(
            captured, stages, stage.index, Timer(torch.device("cpu"), time.thread_time), budget_s=RUN_S
        )
        forward_s = [sum(c.forward_s for c in kind) for kind in costs]
        backward_s = [sum(c.backward_s for c in kind) for kind in costs]
        measured = [f + b for f, b in zip(found.forward_s, found.backward_s, strict=True)]
        predicted = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        row["stages"].append(
            {
                "ops": len(stage.ops),
                "predicted_forward_s": forward_s,
                "predicted_backward_s": backward_s,
                "measured_forward_s": found.forward_s,
                "measured_backward_s": found.backward_s,
                "predicted_ratio": predicted[1] / predicted[0],
                "measured_ratio": measured[1] / measured[0],
                "errors": [p / m - 1 for p, m in zip(predicted, measured, strict=True)],
            }
        )
    return row | {"load": round(os.getloadavg()[0], 2)}


def main(widths: list[int], rounds: int) -> None:
    os.environ["PIPELOOM_KEEP_PROFILES"] = "0"  # what is measured now is held against what is measured now
    machine = describe_machine()
    found = []
    for _ in range(rounds):
        found.append([one_width(width) for width in widths])
        print(json.dumps(found[-1], indent=1), flush=True)
    RESULTS.write_text(json.dumps({"machine": machine, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Predicted and measured seconds of compiled stages.")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    main(given.widths, given.rounds)
