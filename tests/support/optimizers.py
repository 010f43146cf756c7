"""All optimizers of `torch.optim`, and a small model with a tied parameter that they train."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as fn
from runs import Numbers, difference, each_rank, even_plan, merged, plain
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeloom import Job, Pipeline
from pipeloom.ir.errors import PlanError
from pipeloom.ir.graph import UpdateBytes
from pipeloom.ir.plan import widened
from pipeloom.runtime.optimizers import optimizers_of, stand_in, update_bytes
from pipeloom.train import muon

CLASSES: Mapping[str, type[Optimizer]] = {
    name: kind
    for name, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}

Make = Callable[[Iterable[nn.Parameter]], Any]

REFUSED = {"LBFGS": "closure", "SparseAdam": "dense", "Muon": "2D"}
"""Of the sentences with which they are refused a word."""

BOTH = "Muon and AdamW"

TRAINS = (*(name for name in CLASSES if name not in REFUSED), BOTH)

BY_ROLE = "muon+adamw"
"""What `pipeloom train --optimizer` has: its matrices are those of numbered layers only."""

MICROBATCHES, STEPS, CLIP = 2, 4, 0.5


class MuonAndAdamW:
    """Two optimizers in one, as users write it; no `torch.optim.Optimizer` itself."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        params = list(params)
        self.parts = {
            "matrices": torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr),
            "rest": torch.optim.AdamW([p for p in params if p.ndim != 2], lr=lr),
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}


def maker(name: str, **settings: Any) -> Make:
    """What `Job.optimizer` is for one of them."""
    if name == BY_ROLE:
        return lambda named_parameters: muon.MuonAndAdamW(named_parameters, lr=1e-2)
    kind: Any = MuonAndAdamW if name == BOTH else CLASSES[name]
    if name == "SGD":
        settings.setdefault("momentum", 0.9)
    return lambda params: kind(params, lr=1e-2, **settings)


class Tied(nn.Module):
    """Its first and its last matrix are one; gradients are well away from 0. Without a bias, so that some
    stages have matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.tied = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.tied(x)) * self.scale
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        return {"loss": fn.mse_loss(self.tied(x), target)}


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=g, dtype=torch.float64)
    return {"x": x, "target": 3 * x.flip(-1)}


def model() -> nn.Module:
    return Tied().double()


def job_of(name: str, **settings: Any) -> Job:
    return Job(model=model, batch=batch, optimizer=maker(name, **settings), name="tied")


def halving(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def tolerance(name: str) -> float:
    """Muon computes in bfloat16, where the last bit of a sum may turn a rounding."""
    return 2e-3 if "muon" in name.lower() else 1e-9


def batches() -> list[dict[str, Tensor]]:
    return [batch(seed, 2 * MICROBATCHES * 2) for seed in range(STEPS)]


def resumed(name: str, folder: Path) -> Iterator[tuple[str, float]]:
    """An optimizer trains half of its steps in two stages and the others in three, or in two stages of two
    replicas that share out its state: how far parameters are then from those of one process."""
    job = job_of(name)
    two, three = (even_plan(job, stages, microbatches=2 * MICROBATCHES) for stages in (2, 3))
    wide = replace(widened(even_plan(job, 2, microbatches=MICROBATCHES), 2), shard_optimizer=True)
    expected = plain_numbers(name, scheduler=Halving).parameters
    for label, *plans in (("deeper", two, three), ("wider", two, wide), ("back", wide, two)):
        for plan, steps in zip(plans, (range(2), range(2, STEPS)), strict=True):
            train = partial(_train, steps=steps, folder=folder / label)
            parts = each_rank(job, plan, train, clip_norm=CLIP, scheduler=halving, compare=False)
        yield label, difference(merged(parts), expected)[0]


def _train(pipeline: Pipeline, steps: range, folder: Path) -> dict[str, Tensor]:
    """Go on from what is saved there, and save. Returns the parameters."""
    if steps.start:
        pipeline.load(folder)
    for step in steps:
        pipeline.step(batches()[step])
    pipeline.save(folder)
    return {name: p.detach().clone() for name, p in pipeline.weights.params.items()}


class Halving:
    """`halving` as one process has it: of one optimizer, or of both in one."""

    def __init__(self, optimizer: Any) -> None:
        self._parts = [halving(part) for part in optimizers_of(optimizer)]

    def step(self) -> None:
        for part in self._parts:
            part.step()


def plain_numbers(name: str, **options: Any) -> Numbers:
    return plain(job_of(name), batches(), 2 * MICROBATCHES, clip_norm=CLIP, **options)


SIDE = 1024


def table() -> list[str]:
    """The rows of docs/trust.md, one for each class: bytes of a float32 matrix of `SIDE` x `SIDE`."""
    return [_row(name).rstrip() for name in CLASSES]


def _row(name: str) -> str:
    param = stand_in((SIDE, SIDE), torch.float32)
    try:
        (apart,), (at_once,) = (
            update_bytes(maker(name), {"p": param}, kind).values() for kind in (False, True)
        )
    except PlanError as refusal:
        return f"{name:12}refused  {refusal.message.partition(': ')[2]}"
    why = "  refuses other parameters than matrices" if name in REFUSED else ""
    state = f"{apart.state / SIDE**2:.2g}"
    return f"{name:12}equal    {state:8}{_copies(apart):18}{_copies(at_once)}{why}"


def _copies(update: UpdateBytes) -> str:
    copies = round(update.step / SIDE**2 / 4, 2)
    return "0" if not copies else f"{copies:g} of {'all' if update.together else 'the largest'}"
