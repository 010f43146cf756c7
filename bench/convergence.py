"""What does a delay of one update cost, and what wins it back? The default GPT with a flush and without.

    python bench/convergence.py [--one-process] [--optimizers adamw] [--rules 2bw] [--seeds 0] --out runs
    python bench/convergence.py --out runs --show [--plot docs/images/convergence.svg]

A run trains one seed of one optimizer by one rule of `RULES`, and adds its validation losses as a line to the
file; `--show` prints the table of what the file has, by step and by predicted time, and draws the curves.

With --one-process a loop of plain PyTorch does what the rule says, so that an idea can be tried before the
runtime has it. Without it the runtime trains, on one rank: the numbers of 2BW do not depend on the number of
stages (tests/transparency/test_versions.py). Every run of a seed has the same data, weights and rates.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from unittest.mock import patch

import torch
from machine import parser_of, print_stamp, print_table
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from pipeloom import Options, Pipeline, capture, plan
from pipeloom.ir.errors import ConfigError
from pipeloom.runtime.optimizer_bytes import optimizers_of
from pipeloom.tracer.captured import Captured
from pipeloom.train.config import Config
from pipeloom.train.loop import validate
from pipeloom.train.muon import MuonAndAdamW
from pipeloom.train.workload import Workload, gpt_workload, job_of, rate_scheduler, rate_share

EVERY = 40
"""Steps between two validations."""

Curve = list[tuple[int, float]]
"""(steps, validation loss)."""

PIPELINES: dict[str, tuple[int, str | None]] = {
    "4 ranks": (4, None),
    "4 of 11.1 MiB": (4, "11.1MiB"),
    "8 ranks": (8, None),
    "8 of 8.5 MiB": (8, "8.5MiB"),
}
"""Whose steps are simulated: ranks, and the memory of each, which is what 2BW takes where nothing is capped.
The last one gives the seconds of the pictures."""

CONFIG = Config(validation_batches=2)
CONFIG = replace(CONFIG, pipeline=replace(CONFIG.pipeline, microbatches=8, microbatch_size=1))
"""8 sequences of 128 bytes a batch."""


Named = Iterable[tuple[str, nn.Parameter]]


def adamw(named_parameters: Named, beta1: float = 0.9) -> AdamW:
    params = [p for _, p in named_parameters]
    return AdamW(params, lr=4e-3, betas=(beta1, 0.95), weight_decay=0.05)


def sgd(named_parameters: Named, beta1: float = 0.9) -> SGD:
    return SGD([p for _, p in named_parameters], lr=0.5, momentum=beta1)


def muon(named_parameters: Named, beta1: float = 0.9) -> MuonAndAdamW:
    return MuonAndAdamW(named_parameters, betas=(beta1, 0.95))


OPTIMIZERS: dict[str, Callable[..., Any]] = {"adamw": adamw, "sgd-momentum": sgd, "muon+adamw": muon}


def orthogonal(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's Newton-Schulz iteration in float32: torch's own is in bfloat16, which takes CPUs without units
    for it twenty times as long."""
    a, b, c = coefficients
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


@dataclass(frozen=True)
class Rule:
    """How batch b changes the weights W(b). u: the optimizer's update of its gradient g, which is taken at
    W(b - 1).

    flushed: the first batches take theirs at W(b), as all do with a flush.
    applied: u + applied * (u - a), a: what the update before really added: W(b) - W(b - 1).
    update: u + update * (u - u'), u': what the optimizer made of the batch before.
    ahead: the gradient at W(b - 1) + ahead * u'', u'': the update that made W(b - 1); as SpecTrain predicts.
    beta1, rate: other momentum, and learning rate times that.
    """

    flushed: int = 0
    applied: float = 0.0
    update: float = 0.0
    ahead: float = 0.0
    beta1: float | None = None
    rate: float = 1.0


ALWAYS = 1 << 30
RULES = {
    "flush": Rule(flushed=ALWAYS),
    "2bw": Rule(),
    "applied 0.3": Rule(applied=0.3),
    "applied 0.5": Rule(applied=0.5),
    "applied 0.8": Rule(applied=0.8),
    "update 0.5": Rule(update=0.5),
    "update 1.0": Rule(update=1.0),
    "ahead 1.0": Rule(ahead=1.0),
    "ahead 2.0": Rule(ahead=2.0),
    "beta1 0.8": Rule(beta1=0.8),
    "beta1 0.5": Rule(beta1=0.5),
    "half rate": Rule(rate=0.5),
    "flush 60": Rule(flushed=60),
    "flush 100": Rule(flushed=100),
    "flush 200": Rule(flushed=200),
    "flush 100, applied 0.8": Rule(flushed=100, applied=0.8),
    "flush 100, update 1.0": Rule(flushed=100, update=1.0),
    "flush 200, applied 0.8": Rule(flushed=200, applied=0.8),
}


def alone(optimizer: str, rule: Rule, workload: Workload, config: Config) -> Curve:
    """One process, in plain PyTorch."""
    torch.manual_seed(config.seed)
    model = workload.job.model()
    named = list(model.named_parameters())
    params = [p for _, p in named]
    make = OPTIMIZERS[optimizer]
    parts = optimizers_of(make(named) if rule.beta1 is None else make(named, beta1=rule.beta1))
    highest = [[group["lr"] for group in part.param_groups] for part in parts]

    def put(weights: list[Tensor]) -> None:
        for p, w in zip(params, weights, strict=True):
            p.data = w

    def validation() -> float:
        put(newest)
        model.eval()
        with torch.no_grad():
            found = [float(model(**workload.validation(i)).loss) for i in range(config.validation_batches)]
        model.train()
        return fmean(found)

    newest = [p.detach().clone() for p in params]
    before = [w.clone() for w in newest]
    predicted: list[Tensor] | None = None
    last_update = [torch.zeros_like(w) for w in newest]
    curve = []
    for step in range(config.steps):
        if step % EVERY == 0:
            curve.append((step, validation()))
        delayed = step >= rule.flushed
        put((predicted or before) if delayed else newest)
        loss = model(**workload.train(step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(params, config.optimizer.clip_norm)
        for part, rates in zip(parts, highest, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * rule.rate * rate_share(config, step)
        if rule.ahead:
            predicted = [w + rule.ahead * u for w, u in zip(newest, last_update, strict=True)]
        older, before = before, newest
        newest = [w.clone() for w in before]
        if rule.applied and delayed:
            share = 1 / (1 + rule.applied)
            newest = [torch.lerp(o, w, share) for o, w in zip(older, before, strict=True)]
        start = [w.clone() for w in newest]
        put(newest)
        for part in parts:
            part.step()
            part.zero_grad()
        update = [w.detach() - s for w, s in zip(newest, start, strict=True)]
        if rule.applied and delayed:
            for w, b in zip(newest, before, strict=True):
                w.lerp_(b, -rule.applied)
        if rule.update and step and delayed:
            for w, u, other in zip(newest, update, last_update, strict=True):
                w.add_(u - other, alpha=rule.update)
        last_update = update
    curve.append((config.steps, validation()))
    return curve


def in_the_runtime(optimizer: str, rule: Rule, workload: Workload, config: Config) -> Curve:
    """The same by a pipeline of one rank."""
    if rule != Rule(flushed=rule.flushed, applied=rule.applied):
        raise ConfigError("the runtime has no such rule", hint="add --one-process")
    job = replace(workload.job, optimizer=OPTIMIZERS[optimizer])
    how: dict[str, Any] = {}
    if rule.flushed < ALWAYS:
        how = {"weights": "2bw", "delay_correction": rule.applied, "warm_up_with_flush": rule.flushed}
    pipeline_config = config.pipeline
    made = plan(
        job,
        ranks=1,
        microbatches=pipeline_config.microbatches,
        microbatch_size=pipeline_config.microbatch_size,
        **how,
    )
    options = Options(
        seed=config.seed,
        clip_norm=config.optimizer.clip_norm,
        scheduler=rate_scheduler(config),
        compare=False,
    )
    with Pipeline(job, made, options=options) as pipeline:
        curve = [(0, validate(pipeline, config, workload))]
        while (done := pipeline.steps_done) < config.steps:
            end = min(done + EVERY, config.steps)
            for _ in pipeline.steps(map(workload.train, range(done, end))):
                pass
            curve.append((end, validate(pipeline, config, workload)))
    return curve


# --- what the runs say ----------------------------------------------------------------------------


def step_seconds(ranks: int, memory: str | None, captured: Captured) -> dict[str, float]:
    """By weights, seconds of a step of the default GPT, simulated."""
    sizes = CONFIG.pipeline
    made = {
        weights: plan(
            job_of(CONFIG),
            ranks=ranks,
            memory=memory,
            microbatches=sizes.microbatches,
            microbatch_size=sizes.microbatch_size,
            captured=captured,
            cluster=f"{ranks} x cpu",
            weights=weights,
            clips=True,
        )
        for weights in ("flush", "2bw")
    }
    for weights, one in made.items():
        peak = max(one.peaks) / 2**20
        print(
            f"{ranks} ranks, {weights}: {1e3 * one.predicted_step_s:.1f} ms by {one.schedule}, {peak:.1f} MiB"
        )
    return {weights: one.predicted_step_s for weights, one in made.items()}


def show(file: Path, picture: Path | None) -> None:
    """Figures of each rule are compared with those of the same seeds with a flush: at the same step, and at
    the time at which the rule's run ends, if those with a flush go on as long."""
    runs: dict[tuple[str, str, int], dict[int, Curve]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        steps = line["curve"][-1][0]
        runs.setdefault((line["optimizer"], line["rule"], steps), {})[line["seed"]] = line["curve"]
    captured = capture(job_of(CONFIG), CONFIG.pipeline.microbatch_size)
    pipelines = {name: step_seconds(*how, captured) for name, how in PIPELINES.items()}
    rows, drawn = list[dict[str, Any]](), {}
    longest = max(steps for _, rule, steps in runs if rule == "flush")

    def clock(rule: str, step: int, seconds: Mapping[str, float]) -> float:
        flushed = min(step, RULES[rule].flushed)
        return flushed * seconds["flush"] + (step - flushed) * seconds["2bw"]

    for (optimizer, rule, steps), curves in sorted(runs.items(), key=by_rule):
        flush = mean([runs[optimizer, "flush", longest][seed] for seed in curves])
        finals = [curve[-1][1] for curve in curves.values()]
        loss = fmean(finals)
        row = {"optimizer": optimizer, "rule": rule, "seeds": len(curves), "steps": steps}
        row |= {"loss": f"{loss:.3f}", "spread": f"{pstdev(finals):.3f}"}
        ends = {"over its flush": float(steps)}
        for name, seconds in pipelines.items():
            ends[f"by time, {name}"] = clock(rule, steps, seconds) / seconds["flush"]
        row |= {
            name: f"{loss - at(end, flush):+.3f}" if end <= longest else "-" for name, end in ends.items()
        }
        rows.append(row)
        if steps == longest:
            curve = mean(list(curves.values()))
            last = [*pipelines.values()][-1]
            drawn[optimizer, rule] = curve, [(clock(rule, step, last), loss) for step, loss in curve]
    print_table(rows)
    if picture is not None:
        picture.write_text(svg(drawn))


def by_rule(run: tuple[tuple[str, str, int], Any]) -> tuple[str, int, int]:
    optimizer, rule, steps = run[0]
    return optimizer, list(RULES).index(rule), steps


def mean(curves: list[Curve]) -> Curve:
    return [(each[0][0], fmean(loss for _, loss in each)) for each in zip(*curves, strict=True)]


def at(step: float, curve: Curve) -> float:
    """The loss at a step between two validations, by interpolation."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if step <= after:
            return high + (low - high) * (step - before) / (after - before)
    return curve[-1][1]


COLOURS = {"flush": "#7d8fa9", "2bw": "#e0592a"}
OTHERS = (
    *("#12a594", "#9a6be0", "#c99a2e", "#3a77d0", "#d64545"),
    *("#10192b", "#7a9a2e", "#b0529c", "#8a5a2b", "#e08fb0"),
)
WIDE, HIGH, TALLEST = 330, 260, 1.6
"""Of a picture: its size, and the losses that it covers at most; what is higher is cut off."""


def svg(drawn: Mapping[tuple[str, str], tuple[Any, Any]]) -> str:
    """Losses of each optimizer, a row each, by step and by predicted time."""
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in drawn))
    rules = sorted({rule for _, rule in drawn}, key=list(RULES).index)
    others = [rule for rule in rules if rule not in COLOURS]
    colours = COLOURS | dict(zip(others, itertools.cycle(OTHERS), strict=False))
    parts = []
    for row, optimizer in enumerate(optimizers):
        for column, axis in enumerate(("steps", "predicted seconds")):
            left, top = 50 + column * (WIDE + 50), 76 + row * (HIGH + 50)
            shown = {rule: both[column] for (o, rule), both in drawn.items() if o == optimizer}
            end = max(x for curve in shown.values() for x, _ in curve)
            losses = [loss for curve in shown.values() for _, loss in curve[1:]]
            low = math.floor(5 * min(losses)) / 5
            step = min(math.ceil(5 * max(losses)) / 5 - low, TALLEST) / 4
            parts.append(f'<rect x="{left}" y="{top}" width="{WIDE}" height="{HIGH}" class="frame"/>')
            parts.append(f'<text x="{left}" y="{top - 8}">{optimizer}, by {axis} (0 to {end:.0f})</text>')
            for line in range(5):
                y = top + HIGH * (4 - line) / 4
                parts.append(f'<path d="M{left} {y:.0f}h{WIDE}" class="grid"/>')
                parts.append(f'<text x="{left - 30}" y="{y + 4:.0f}">{low + line * step:.2f}</text>')
            parts.append(f'<svg x="{left}" y="{top}" width="{WIDE}" height="{HIGH}">')
            for rule, curve in shown.items():
                points = [(WIDE * x / end, HIGH * (1 - (loss - low) / (4 * step))) for x, loss in curve]
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                parts.append(f'<polyline points="{path}" stroke="{colours[rule]}"/>')
            parts.append("</svg>")
    for index, rule in enumerate(rules):
        left, top = 50 + index % 4 * 180, 14 + index // 4 * 14
        parts.append(f'<text x="{left}" y="{top}" fill="{colours[rule]}">{rule}</text>')
    style = "text{font:12px sans-serif}.frame{fill:none;stroke:#888}.grid{stroke:#8884}"
    style += "polyline{fill:none;stroke-width:1.6}"
    size = f'width="{2 * WIDE + 120}" height="{len(optimizers) * (HIGH + 50) + 40}"'
    body = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{body}</svg>'


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--one-process", action="store_true", help="in plain PyTorch, not by the runtime")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["flush", "2bw"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True, help="file of runs, which grows")
    parser.add_argument("--show", action="store_true", help="train nothing; print what the file has")
    parser.add_argument("--plot", type=Path, help="with --show: draw it as SVG")
    given = parser.parse_args()
    print_stamp()
    if given.show:
        show(given.out, given.plot)
        return 0
    torch.set_num_threads(1)
    train = alone if given.one_process else in_the_runtime
    with patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonal):
        for seed in given.seeds:
            config = replace(CONFIG, seed=seed, steps=given.steps)
            workload = gpt_workload(config)
            for optimizer, name in itertools.product(given.optimizers, given.rules):
                begin = time.perf_counter()
                curve = train(optimizer, RULES[name], workload, config)
                line = {"optimizer": optimizer, "rule": name, "seed": seed, "curve": curve}
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                took = time.perf_counter() - begin
                print(f"{optimizer:12} {name:14} seed {seed} {curve[-1][1]:.4f} {took:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
