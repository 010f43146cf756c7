"""A chain of matrix products with skips, of any width: little code, much to keep."""

from functools import partial

import torch
from batches import normal
from torch import Tensor, nn

from pipeloom import Job


class Products(nn.Module):
    """Six layers. Shapes: x and y (rows, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def job(width: int) -> Job:
    return Job(
        model=partial(Products, width),
        batch=normal(x=(width,), y=(width,)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
