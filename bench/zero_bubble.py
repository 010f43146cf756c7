"""Does splitting the backward pay? Zero-bubble schedules against 1F1B on two real ranks.

    python bench/zero_bubble.py [--microbatches 8 16] [--rounds 15] [--seconds 300] [--again]

Two processes of one thread each train the same model on the same micro-batches; in every round each schedule
runs one step, so that a machine shared with others disturbs them alike. 1F1B runs full backwards (B), zb_h1
and zb_v split ones (I and W), dualpipev both in its published order. All plans are made by the planner from
one profile. Ratios are medians over the rounds of 1F1B's step time over the other's: above 1, the other is
faster.

Besides the ratio it records what explains it: what splitting costs (bench/backward_figures.py says what is
compared with what), each schedule's idle share, and what the ratio would be by simulation with the times that
the ranks measured before training. The model's first stage has no input gradients to send: its I is empty and
its W the whole backward.

Rounds of one number of micro-batches end after `--seconds`, with those that were run by then. Results are
written after every round, and a number whose rounds are in the file is not measured again without `--again`:
a run that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from backward_figures import Measured, actions_of, split_line
from machine import describe_machine
from model import MICROBATCH, batch_of, job

from pipeloom import Pipeline, Plan, plan
from pipeloom.api import capture, profile
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
            job(),
            stages=2,
            microbatches=microbatches,
            microbatch_size=MICROBATCH,
            schedule=name,
            captured=captured,
            profiled=measured,
        )
        for name in NAMES
    }


def rank_main(microbatches: int, rounds: int, limit_s: float, made: dict[str, Plan], file: Path) -> None:
    torch.set_num_threads(1)
    steps: dict[str, list[float]] = {name: [] for name in NAMES}
    bubbles: dict[str, list[float]] = {name: [] for name in NAMES}
    actions: dict[str, list[dict[tuple[int, str], list[float]]]] = {name: [] for name in NAMES}
    begin = time.perf_counter()
    with ExitStack() as stack:
        running = {name: stack.enter_context(Pipeline(job(), made[name])) for name in NAMES}
        predicted = {name: pipeline.predict().step_s for name, pipeline in running.items()}
        for index in range(rounds + WARM_UP):
            batch = batch_of(index, microbatches * MICROBATCH)
            found = {name: one_step(pipeline, batch) for name, pipeline in running.items()}
            # Rank 0 says for both when the time is up.
            everyone = running[BASE].channel.all_gather_object((found, time.perf_counter() - begin))
            if index < WARM_UP:
                continue
            last = index + 1 == rounds + WARM_UP or everyone[0][1] > limit_s
            for name in NAMES:
                steps[name].append(found[name][0])
                bubbles[name].append(found[name][1])
                actions[name].append({k: v for ranks, _ in everyone for k, v in ranks[name][2].items()})
            if dist.get_rank() == 0:
                measured = {
                    name: Measured(
                        ops=[stage.ops for stage in made[name].stages],
                        microbatches=microbatches,
                        rounds=actions[name],
                    )
                    for name in NAMES
                }
                figures = summary(microbatches, steps, bubbles, predicted, measured)
                keep(figures | {"wanted_rounds": rounds, "finished": last}, file)
            if last:
                break
    if dist.get_rank() == 0:
        show(figures)


def one_step(pipeline: Pipeline, batch: dict) -> tuple[float, float, dict[tuple[int, str], list[float]]]:
    """Seconds of a step, its idle share, and the seconds of this rank's actions by stage and kind."""
    dist.barrier()
    start = time.perf_counter()
    pipeline.step(batch)
    dist.barrier()
    seconds = time.perf_counter() - start
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in pipeline.recorder.events():
        if event.stream == "compute" and event.action[-1].isdigit():
            action = parse_action(event.action)
            found[action.stage, action.kind].append(event.duration_s)
    return seconds, pipeline.report.bubble, dict(found)


def summary(
    microbatches: int,
    steps: dict[str, list[float]],
    bubbles: dict[str, list[float]],
    predicted: dict[str, float],
    measured: dict[str, Measured],
) -> dict:
    return {
        "microbatches": microbatches,
        "rounds": len(steps[BASE]),
        "schedules": {
            name: {
                "median_s": statistics.median(steps[name]),
                "steps_s": steps[name],
                "faster_than_1f1b": statistics.median(
                    a / b for a, b in zip(steps[BASE], steps[name], strict=True)
                ),
                "predicted_faster_than_1f1b": predicted[BASE] / predicted[name],
                "bubble": statistics.median(bubbles[name]),
                **actions_of(name, BASE, measured),
            }
            for name in NAMES
        },
    }


def show(figures: dict) -> None:
    count, rounds = figures["microbatches"], figures["rounds"]
    print(f"{count} micro-batches, 2 ranks, {rounds} rounds; ratio above 1: faster than 1F1B")
    for name, row in figures["schedules"].items():
        print(
            f"  {name:<10} {row['median_s'] * 1e3:7.1f} ms  ratio {row['faster_than_1f1b']:.3f} "
            f"(simulated {row['predicted_faster_than_1f1b']:.3f})  bubble {row['bubble']:.1%}",
            flush=True,
        )
    for name in NAMES[1:]:
        row = figures["schedules"][name]
        gain = row["faster_than_1f1b"] - 1
        print(f"  {name} is {abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than 1F1B")
        print(f"  {split_line(name, row, BASE)}", flush=True)


def known(file: Path) -> list[dict]:
    """Runs in the results that have all that `show` reads."""
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    return [run for run in runs if "wanted_rounds" in run]


def keep(figures: dict, file: Path) -> None:
    """Write the results with these figures in place of older ones of as many micro-batches."""
    others = [run for run in known(file) if run["microbatches"] != figures["microbatches"]]
    runs = sorted([*others, figures], key=lambda run: run["microbatches"])
    whole = json.dumps({"machine": describe_machine(), "runs": runs}, indent=1) + "\n"
    beside = file.with_suffix(".part")  # so that a run that is broken off leaves a whole file
    beside.write_text(whole)
    beside.replace(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300, help="most, for each number of micro-batches")
    parser.add_argument("--again", action="store_true", help="measure also what the results have")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for count in options.microbatches:
        done = [r for r in known(options.output) if (r["microbatches"], r["finished"]) == (count, True)]
        if done and done[0]["wanted_rounds"] >= options.rounds and not options.again:
            show(done[0])
            continue
        arguments = (count, options.rounds, options.seconds, plans(count), options.output)
        if launch(rank_main, 2, args=arguments) != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
