"""What a delay of one update does to training: the default GPT, with a flush and with 2BW.

    python bench/convergence.py [--steps 120] [--seeds 3]

The numbers of 2BW do not depend on the number of stages (tests/transparency/test_versions.py), so each run is
one process with the model uncut. Every run of a seed has the same data, initial weights and learning rates:
those of `pipeloom train`, with AdamW, and with SGD with momentum, whose rate is higher. By predicted time: a
step of four stages that take equally long, m = 8: with a flush (m + d - 1) / m = 11/8 of one without.

Prints a table, and draws the plot that docs/results.md shows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from machine import print_stamp, print_table
from plotly.subplots import make_subplots
from plots import save_plot
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from pipeloom import Options, Pipeline, plan
from pipeloom.planning import capture, profile
from pipeloom.train.config import Config
from pipeloom.train.loop import validate
from pipeloom.train.workload import gpt_workload, rate_scheduler

MICROBATCHES, ROWS, DEPTH = 2, 4, 4
EVERY = 10
"""Steps between two validations."""
FLUSHED_STEP = (8 + DEPTH - 1) / 8

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(AdamW, lr=4e-3, weight_decay=0.05),
    "sgd-momentum": partial(SGD, lr=0.1, momentum=0.9),
}


def run(optimizer: str, weights: str, seed: int, steps: int, shared: dict[str, Any]) -> dict[str, Any]:
    """One run: the validation loss after every `EVERY` steps."""
    config = Config(seed=seed, steps=steps)
    config = replace(
        config,
        pipeline=replace(config.pipeline, microbatches=MICROBATCHES, microbatch_size=ROWS),
        optimizer=replace(config.optimizer, warmup_steps=20),
        validation_batches=2,
    )
    workload = gpt_workload(config)
    job = replace(workload.job, optimizer=OPTIMIZERS[optimizer])
    if "captured" not in shared:
        shared["captured"] = capture(job, ROWS)
        shared["profiled"] = profile(shared["captured"])
    made = plan(
        job,
        ranks=1,
        microbatches=MICROBATCHES,
        microbatch_size=ROWS,
        weights=weights,
        **shared,
    )
    options = Options(
        seed=seed, clip_norm=config.optimizer.clip_norm, scheduler=rate_scheduler(config), compare=False
    )
    with Pipeline(job, made, options=options, captured=shared["captured"]) as pipeline:
        losses = [(0, validate(pipeline, config, workload))]
        while pipeline.steps_done < steps:
            done = pipeline.steps_done
            for _ in pipeline.steps(map(workload.train, range(done, min(done + EVERY, steps)))):
                pass
            losses.append((pipeline.steps_done, validate(pipeline, config, workload)))
    return {"optimizer": optimizer, "weights": weights, "seed": seed, "validation": losses}


def mean_curve(runs: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, mean, standard deviation over seeds)."""
    columns = zip(*(run["validation"] for run in runs), strict=True)
    return [
        (column[0][0], statistics.fmean(v for _, v in column), statistics.pstdev(v for _, v in column))
        for column in columns
    ]


def reaches(curve: list[tuple[int, float, float]], loss: float) -> float | None:
    """The first step, between two validations by interpolation, at which a curve is as low as a loss."""
    for (before, high, _), (after, low, _) in zip(curve, curve[1:], strict=False):
        if low <= loss:
            return before + (after - before) * (high - loss) / max(high - low, 1e-12)
    return None


def draw(curves: dict[str, dict[str, list[tuple[int, float, float]]]]) -> None:
    """Validation loss by step, and by predicted time, one column per optimizer."""
    figure = make_subplots(
        rows=2,
        cols=len(curves),
        subplot_titles=[f"{name}, by {axis}" for axis in ("step", "predicted time") for name in curves],
    )
    ink = {"flush": "#4477aa", "2bw": "#cc6677"}
    for column, by_weights in enumerate(curves.values(), start=1):
        for weights, curve in by_weights.items():
            share = FLUSHED_STEP if weights == "flush" else 1.0
            for row, scale in ((1, 1.0), (2, share)):
                figure.add_scatter(
                    x=[step * scale for step, _, _ in curve],
                    y=[loss for _, loss, _ in curve],
                    error_y={"array": [spread for _, _, spread in curve], "thickness": 0.7, "width": 2},
                    name=weights,
                    line={"color": ink[weights]},
                    showlegend=row == column == 1,
                    row=row,
                    col=column,
                )
    figure.update_yaxes(title="validation loss", col=1)
    save_plot(figure, "convergence.png", 900, 640)


def main(steps: int, seeds: int) -> int:
    torch.set_num_threads(1)
    print_stamp()
    shared: dict[str, Any] = {}
    runs = []
    for optimizer in OPTIMIZERS:
        for seed in range(seeds):
            for weights in ("flush", "2bw"):
                runs.append(run(optimizer, weights, seed, steps, shared))
                last = runs[-1]["validation"][-1][1]
                print(f"{optimizer:<13} seed {seed} {weights:<6} validation loss {last:.4f}", flush=True)
    curves = {
        o: {
            w: mean_curve([r for r in runs if (r["optimizer"], r["weights"]) == (o, w)])
            for w in ("flush", "2bw")
        }
        for o in OPTIMIZERS
    }
    rows = []
    for optimizer, by_weights in curves.items():
        final = by_weights["flush"][-1][1]
        row = {
            "optimizer": optimizer,
            "flush: mean, spread": by_weights["flush"][-1][1:],
            "2bw: mean, spread": by_weights["2bw"][-1][1:],
            "2bw reaches half of the flush's gain at step": reaches(
                by_weights["2bw"], (by_weights["flush"][0][1] + final) / 2
            ),
            "flush reaches half of its gain at step": reaches(
                by_weights["flush"], (by_weights["flush"][0][1] + final) / 2
            ),
            "2bw reaches the flush's final loss at step": reaches(by_weights["2bw"], final),
            "flush reaches 2bw's final loss at step": reaches(by_weights["flush"], by_weights["2bw"][-1][1]),
        }
        rows.append(row)
    print_table(rows, f"Validation loss after {steps} steps, {seeds} seeds")
    draw(curves)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(main(arguments.steps, arguments.seeds))
