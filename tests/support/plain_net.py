"""A small model that a script makes at once: nothing but PyTorch is loaded."""

import torch
from torch import nn

from pipeloom import Job


def two_linears() -> Job:
    """Two linear layers that are trained by SGD; their batches need no random numbers."""
    return Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
        batch=lambda seed, rows: {"input": torch.full((rows, 8), 0.1 * (seed + 1))},
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
