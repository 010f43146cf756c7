"""What does a delay of one update cost, and what wins it back? The default GPT with a flush and without.

    python bench/convergence.py --one-process --optimizers adamw --seeds 0 --out curves.jsonl
    python bench/convergence.py --out curves.jsonl --show [--plot curves.png]

A run trains one seed of one optimizer by one rule of `RULES`, and adds its validation losses as a line to the
file; `--show` prints the table of what the file has, by step and by predicted time, and draws the curves.

With --one-process a loop of plain PyTorch does what the rule says, so that an idea can be tried before the
runtime has it. Without it the runtime trains, on one rank: the numbers of 2BW do not depend on the number of
stages (tests/transparency/test_versions.py). Every run of a seed has the same data, weights and rates.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from machine import parser_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from pipeloom.train.config import Config
from pipeloom.train.workload import Workload, gpt_workload, rate_share

EVERY = 40
"""Steps between two validations."""

CONFIG = Config(validation_batches=2)
CONFIG = replace(CONFIG, pipeline=replace(CONFIG.pipeline, microbatches=8, microbatch_size=1))
"""8 sequences of 128 bytes a batch."""


def adamw(
    params: Iterable[tuple[str, nn.Parameter]], beta1: float = 0.9, rate: float = 4e-3
) -> list[Optimizer]:
    return [AdamW([p for _, p in params], lr=rate, betas=(beta1, 0.95), weight_decay=0.05)]


def sgd(params: Iterable[tuple[str, nn.Parameter]], beta1: float = 0.9, rate: float = 0.5) -> list[Optimizer]:
    return [SGD([p for _, p in params], lr=rate, momentum=beta1)]


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


def muon(
    params: Iterable[tuple[str, nn.Parameter]], beta1: float = 0.95, rate: float = 4e-3
) -> list[Optimizer]:
    named = list(params)
    matrices = [p for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    ids = set(map(id, matrices))
    rest = [p for _, p in named if id(p) not in ids]
    return [
        Muon(matrices, lr=rate, weight_decay=0.05, momentum=beta1, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.05),
    ]


OPTIMIZERS: dict[str, Callable[..., list[Optimizer]]] = {
    "adamw": adamw,
    "sgd-momentum": sgd,
    "muon+adamw": muon,
}


@dataclass(frozen=True)
class Rule:
    """How batch b changes the weights W(b). u: the optimizer's update of its gradient g, which is taken at
    W(b - 1).

    flushed: the first batches take theirs at W(b), as all do with a flush.
    applied: u + applied * (u - a), a: what the update before really added: W(b) - W(b - 1).
    update: u + update * (u - u'), u': what the optimizer made of the batch before.
    ahead: the gradient at W(b - 1) + ahead * u'', u'': the update that made W(b - 1); as SpecTrain predicts.
    gradient: g + gradient * (g - g').
    compensated: g + compensated * g * g * (W(b) - W(b - 1)), as DC-ASGD.
    beta1, rate: other momentum, and learning rate times that.
    """

    flushed: int = 0
    applied: float = 0.0
    update: float = 0.0
    ahead: float = 0.0
    gradient: float = 0.0
    compensated: float = 0.0
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
    "gradient 1.0": Rule(gradient=1.0),
    "compensated 1": Rule(compensated=1.0),
    "beta1 0.8": Rule(beta1=0.8),
    "beta1 0.5": Rule(beta1=0.5),
    "half rate": Rule(rate=0.5),
    "flush 60": Rule(flushed=60),
    "flush 100": Rule(flushed=100),
    "flush 200": Rule(flushed=200),
}


def alone(optimizer: str, rule: Rule, workload: Workload, config: Config) -> list[tuple[int, float]]:
    torch.manual_seed(config.seed)
    model = workload.job.model()
    named = list(dict(model.named_parameters()).items())
    params = [p for _, p in named]
    make = OPTIMIZERS[optimizer]
    parts = make(named) if rule.beta1 is None else make(named, beta1=rule.beta1)
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
        return statistics.fmean(found)

    newest = [p.detach().clone() for p in params]
    before = [w.clone() for w in newest]
    predicted: list[Tensor] | None = None
    last_update = [torch.zeros_like(w) for w in newest]
    last_gradient: list[Tensor] | None = None
    curve = []
    for step in range(config.steps):
        if step % EVERY == 0:
            curve.append((step, validation()))
        delayed = step >= rule.flushed
        put((predicted or before) if delayed else newest)
        loss = model(**workload.train(step)).loss
        loss.backward()
        gradients = [p.grad for p in params]
        if rule.gradient and delayed and last_gradient is not None:
            kept = [g.clone() for g in gradients]
            for g, other in zip(gradients, last_gradient, strict=True):
                g.add_(g - other, alpha=rule.gradient)
            last_gradient = kept
        elif rule.gradient:
            last_gradient = [g.clone() for g in gradients]
        if rule.compensated and delayed:
            for g, new, old in zip(gradients, newest, before, strict=True):
                g.add_(g * g * (new - old), alpha=rule.compensated)
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
        if rule.update and step:
            for w, u, other in zip(newest, update, last_update, strict=True):
                w.add_(u - other, alpha=rule.update)
        last_update = update
    curve.append((config.steps, validation()))
    return curve


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["flush", "2bw"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonal).start()
    for seed in given.seeds:
        config = replace(CONFIG, seed=seed, steps=given.steps)
        workload = gpt_workload(config)
        for optimizer in given.optimizers:
            for name in given.rules:
                begin = time.perf_counter()
                curve = alone(optimizer, RULES[name], workload, config)
                line = {
                    "optimizer": optimizer,
                    "rule": name,
                    "seed": seed,
                    "steps": given.steps,
                    "curve": curve,
                }
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                took = time.perf_counter() - begin
                print(f"{optimizer:12} {name:14} seed {seed} {curve[-1][1]:.4f} {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
