"""What makes the batches of jobs."""

from collections.abc import Callable

import torch
from torch import Tensor

Batch = dict[str, Tensor]
MakeBatch = Callable[[int, int], Batch]


def normal(dtype: torch.dtype = torch.float32, /, **shapes: tuple[int, ...]) -> MakeBatch:
    """Of normal numbers, by name and the shape of a row."""
    known = tuple(shapes.items())  # by which `runs.shared_captures` tells what this made

    def batch(seed: int, rows: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(rows, *shape, generator=generator, dtype=dtype) for name, shape in known}

    return batch
