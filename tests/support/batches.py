"""What makes the batches of jobs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Batch = dict[str, Tensor]
MakeBatch = Callable[[int, int], Batch]


def normal(**shapes: tuple[int, ...]) -> MakeBatch:
    """Of normal numbers, by name and the shape of a row."""
    known = tuple(shapes.items())  # by which `runs.shared_captures` tells what this made

    def batch(seed: int, rows: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(rows, *shape, generator=generator) for name, shape in known}

    return batch
