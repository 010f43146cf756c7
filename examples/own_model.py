"""A model of your own: a function that returns a `pipeloom.Job`, named on the command line.

    pipeloom verify examples/own_model.py:job --ranks 3
    pipeloom train --job examples/own_model.py:job --ranks 3 --set pipeline.microbatch_size=16

The model knows nothing of pipelines. It has a skip connection over several layers, which may cross
several stages.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipeloom


class Spiral(nn.Module):
    """Tells two intertwined spirals apart."""

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.leave = nn.Linear(width, 2)

    def forward(self, points: Tensor, arm: Tensor) -> Tensor:
        """points: [rows, 2].  arm: [rows], which spiral; only the loss reads it.  Returns: [rows, 2]."""
        entered = x = torch.tanh(self.enter(points))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.leave(x + entered)


def batch(seed: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(2, (size,), generator=generator)
    angle = 3 * torch.pi * torch.rand(size, generator=generator).sqrt()
    turned = angle + torch.pi * arm
    points = torch.stack([turned.cos(), turned.sin()], dim=1) * angle[:, None] / 10
    return {"points": points, "arm": arm}


def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(logits, batch["arm"])


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def job() -> pipeloom.Job:
    return pipeloom.Job(name="spiral", model=Spiral, batch=batch, loss=loss, optimizer=optimizer)
