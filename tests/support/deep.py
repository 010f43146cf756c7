"""A deep chain of layers of one width: each activation of the same size, so that levels can be counted."""

from collections.abc import Callable, Collection
from functools import partial

import nets
import torch
from batches import normal
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.memory_policy import Treatment

DEPTH, WIDTH, ROWS = 12, 8, 512
ACTIVATION = ROWS * WIDTH * 4
"""Bytes of what one layer makes, for `ROWS` rows."""


class Deep(nn.Module):
    """Shapes: x and y (rows, width)."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return (x * y).mean()


ROW = normal(x=(WIDTH,), y=(WIDTH,))

TANH = Job(model=partial(Deep, torch.tanh), batch=ROW, optimizer=nets.sgd)
"""Each layer leaves one residual, its output."""

GELU = Job(model=partial(Deep, nn.functional.gelu), batch=ROW, optimizer=nets.sgd)
"""Each layer leaves two: what gelu reads, and what it makes for the next layer's weights."""


def checkpoints(residuals: Collection[str], distance: int) -> dict[str, Treatment]:
    """Keep every so many of the residuals, the last one among them."""
    return {name: "recompute" for i, name in enumerate(residuals) if i % distance != distance - 1}
