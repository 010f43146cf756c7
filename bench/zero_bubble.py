"""Does splitting the backward pay? Zero-bubble schedules against 1F1B on two real ranks.

    python bench/zero_bubble.py [--microbatches 8 16] [--rounds 15]

Two processes of one thread each train the same model on the same micro-batches; in every round each schedule
runs one step, so that a machine shared with others disturbs them alike. 1F1B runs full backwards (B), the
others split ones (I and W). All plans are made by the planner from one profile. Ratios are medians over the
rounds of 1F1B's step time over the other's: above 1, the other is faster.

Besides the ratio it records what explains it: the seconds of I and W together over those of B for the same
model (what splitting costs), each schedule's idle share, and what the ratio would be by simulation with the
times that the ranks measured before training. The model's first stage has no input gradients to send: its I
is empty and its W the whole backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from machine import describe_machine
from model import MICROBATCH, batch_of, job

from pipeloom import Pipeline, Plan, plan
from pipeloom.api.passes import capture, profile
from pipeloom.ir.action import parse_action
from pipeloom.runtime.launch import launch

RESULTS = Path(__file__).parent / "results" / "zero_bubble.json"
BASE = "1f1b"
NAMES = (BASE, "zb_h1", "zb_v", "dualpipev")
WARM_UP = 3


def plans(microbatches: int) -> dict[str, Plan]:
    """One profile for all: what differs is the schedule, and for those in a V the cut into four."""
    captured = capture(job(), MICROBATCH)
    measured = profile(captured)
    return {
        name: plan(
            job(), stages=2, microbatches=microbatches, microbatch_size=MICROBATCH, schedule=name,
            captured=captured, profiled=measured,
        )
        for name in NAMES
    }  # fmt: skip


def rank_main(microbatches: int, rounds: int, made: dict[str, Plan], file: Path) -> None:
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    bubbles: dict[str, list[float]] = {name: [] for name in NAMES}
    kinds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in NAMES}
    with ExitStack() as stack:
        running = {name: stack.enter_context(Pipeline(job(), made[name])) for name in NAMES}
        predicted = {name: pipeline.predict().step_s for name, pipeline in running.items()}
        for index in range(rounds + WARM_UP):
            batch = batch_of(index, microbatches * MICROBATCH)
            for name, pipeline in running.items():
                dist.barrier()
                start = time.perf_counter()
                pipeline.step(batch)
                dist.barrier()
                if index < WARM_UP:
                    continue
                seconds[name].append(time.perf_counter() - start)
                bubbles[name].append(pipeline.report.bubble)
                for kind, total in busy(pipeline).items():
                    kinds[name][kind].append(total)
        compute = {
            name: {kind: statistics.median(values) for kind, values in table.items()}
            for name, table in kinds.items()
        }
        everyone = running[BASE].channel.all_gather_object(compute)
    if dist.get_rank() == 0:
        total = {
            name: {kind: sum(rank[name][kind] for rank in everyone) for kind in compute[name]}
            for name in NAMES
        }
        figures = summary(microbatches, seconds, bubbles, total, predicted)
        file.write_text(json.dumps(figures))
        show(figures)


def busy(pipeline: Pipeline) -> dict[str, float]:
    """Seconds of this rank's last step by kind of compute action."""
    found: dict[str, float] = defaultdict(float)
    for event in pipeline.recorder.events():
        if event.stream == "compute" and event.action[-1].isdigit():
            found[parse_action(event.action).kind] += event.duration_s
    return found


def summary(
    microbatches: int, seconds: dict[str, list[float]], bubbles: dict[str, list[float]],
    total: dict[str, dict[str, float]], predicted: dict[str, float],
) -> dict[str, object]:  # fmt: skip
    full = total[BASE]["B"]
    return {
        "microbatches": microbatches,
        "schedules": {
            name: {
                "median_s": statistics.median(seconds[name]),
                "steps_s": seconds[name],
                "faster_than_1f1b": statistics.median(
                    a / b for a, b in zip(seconds[BASE], seconds[name], strict=True)
                ),
                "predicted_faster_than_1f1b": predicted[BASE] / predicted[name],
                "bubble": statistics.median(bubbles[name]),
                "compute_s_of_all_ranks": total[name],
                "split_over_full_backward": (total[name]["I"] + total[name]["W"]) / full
                if name != BASE else 1.0,
            }
            for name in NAMES
        },
    }  # fmt: skip


def show(figures: dict) -> None:
    print(f"{figures['microbatches']} micro-batches, 2 ranks; ratio above 1: faster than 1F1B")
    for name, row in figures["schedules"].items():
        print(
            f"  {name:<10} {row['median_s'] * 1e3:7.1f} ms  ratio {row['faster_than_1f1b']:.3f} "
            f"(simulated {row['predicted_faster_than_1f1b']:.3f})  bubble {row['bubble']:.1%}  "
            f"(I + W) / B = {row['split_over_full_backward']:.3f}", flush=True,
        )  # fmt: skip
    for name in NAMES[1:]:
        row = figures["schedules"][name]
        gain, cost = row["faster_than_1f1b"] - 1, row["split_over_full_backward"] - 1
        verdict = "faster" if gain > 0 else "slower"
        print(f"  {name} is {abs(gain):.1%} {verdict} than 1F1B; splitting its backward costs {cost:+.1%}")


def main(microbatches: list[int], rounds: int) -> int:
    machine, runs = describe_machine(), []
    torch.set_num_threads(1)
    for count in microbatches:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            if launch(rank_main, 2, args=(count, rounds, plans(count), file)) != 0:
                return 1
            runs.append(json.loads(file.read_text()))
    RESULTS.write_text(json.dumps({"machine": machine, "rounds": rounds, "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    sys.exit(main(arguments.microbatches, arguments.rounds))
