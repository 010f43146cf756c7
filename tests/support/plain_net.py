"""Small models whose subclasses change one thing."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom import Job

WIDTH = 6


def vectors(seed: int, rows: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=made)
    return {"x": x, "y": torch.randint(3, (rows,), generator=made)}


class PlainNet(nn.Module):
    """Four modules. Subclasses replace what is made, and what runs between the batch and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.c = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.prepare()

    def prepare(self) -> None:
        pass

    def run(self, h: Tensor) -> Tensor:
        return self.c(self.b(self.a(h)))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.run(x)), y)}


def job_of(model: Callable[[], nn.Module]) -> Job:
    def sgd(params: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)  # type: ignore[arg-type]

    return Job(model=model, batch=vectors, optimizer=sgd, name=model.__name__)


def two_linears() -> Job:
    """Two linear layers that are trained by SGD; their batches need no random numbers."""
    return Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
        batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * (seed + 1))},
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
