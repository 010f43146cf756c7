"""A rank that becomes slow in the middle of a run: what `train --replan` gains.

    python bench/replan.py [--steps 60]

Four ranks whose layers sleep instead of computing, so that they fit two cores: 24 layers, 4 ms forward and
8 ms backward for each micro-batch. From step 15 on one rank sleeps twice as long. Three runs of it, one
after the other: `slowed` with --replan 10, `left` without, and `even` with --replan 10 and nothing slowed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import parser_of
from torch import Tensor, nn

import pipeloom

LAYERS, WIDTH, LAYER_S = 24, 32, 0.004
RANKS, SLOW_RANK, SLOW_FROM, EVERY = 4, "1", 15, 10
MARK = "PACED_SLOW_NOW"
"""Environment variable: a file; the slow rank is slow from when it is there."""


@torch.library.custom_op("paced::work", mutates_args=())
def work(x: Tensor) -> Tensor:
    _sleep(LAYER_S)
    return x.clone()


@work.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("paced::work_back", mutates_args=())
def work_back(grad: Tensor) -> Tensor:
    _sleep(2 * LAYER_S)
    return grad.clone()


@work_back.register_fake
def _(grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


work.register_autograd(lambda ctx, grad: work_back(grad))


def _sleep(seconds: float) -> None:
    slow = os.environ.get("RANK") == SLOW_RANK and Path(os.environ.get(MARK, "/nowhere")).exists()
    time.sleep(seconds * (2 if slow else 1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return work(torch.tanh(self.linear(x)))


def job() -> pipeloom.Job:
    return pipeloom.Job(
        model=lambda: nn.Sequential(*(Layer() for _ in range(LAYERS))),
        batch=lambda seed, rows: {
            "input": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
        },
        loss=lambda output, batch: output.square().mean(),
        name="paced",
    )


def train(steps: int, *, replan: int, slowed: bool, folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    out, mark = folder / f"run-{replan}-{slowed}", folder / f"mark-{replan}-{slowed}"
    command = [
        sys.executable,
        "-m",
        "pipeloom",
        "train",
        "--job",
        f"{__file__}:job",
        "--cluster",
        f"{RANKS} x cpu",
    ]
    command += ["--ranks", str(RANKS), "--planner", "exact", "--schedule", "1f1b", "--microbatches", "8"]
    command += ["--microbatch-size", "2", "--steps", str(steps), "--replan", str(replan), "--out", str(out)]
    command += ["--no-compare"]
    with subprocess.Popen(command, env={**os.environ, MARK: str(mark)}, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.2)
            if slowed and len(_lines(out)) >= SLOW_FROM:
                mark.touch()
    if process.returncode:
        raise SystemExit(process.returncode)
    return _lines(out)


def _lines(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slowed = train(steps, replan=EVERY, slowed=True, folder=folder)
        left = train(steps, replan=0, slowed=True, folder=folder)
        even = train(steps, replan=EVERY, slowed=False, folder=folder)
    looks = {
        name: [line["replan"] for line in run if "replan" in line]
        for name, run in (("slowed", slowed), ("even", even))
    }
    last = {
        name: statistics.median(
            line["step_s"] for line in run if line["step"] > steps - 10 and "step_s" in line
        )
        for name, run in (("slowed", slowed), ("left", left), ("even", even))
    }
    losses = [{line["step"]: line["loss"] for line in run if "loss" in line} for run in (slowed, left)]
    apart = max(abs(losses[0][step] - losses[1][step]) for step in losses[1])
    print(
        f"step of the last ten: even {last['even']:.3f} s, left slow {last['left']:.3f} s, "
        f"replanned {last['slowed']:.3f} s"
    )
    print(f"shorter by {1 - last['slowed'] / last['left']:.1%}; losses apart by {apart:.2g}")
    for name, found in looks.items():
        print(f"{name}: {sum(look['switched'] for look in found)} switches; {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
