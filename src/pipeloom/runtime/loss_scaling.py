"""Where the loss is scaled: by each micro-batch's share of the step's loss.

A step's loss is the mean over its batch (over its tokens, with `Job.weight`). Micro-batches need not be of
one size, so each loss, a mean over its own micro-batch, counts with its share of the whole:

    loss = sum_m w_m loss_m,    w_m = weight_m / sum_k weight_k,    d loss / d loss_m = w_m

The backward of micro-batch m therefore starts from the gradient w_m, and sums of gradients need no division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..ir.errors import BatchError
from .step_state import Microbatch


def loss_shares(
    parts: Sequence[Mapping[str, Tensor]], weight: Callable[[Mapping[str, Tensor]], float | Tensor] | None
) -> list[float]:
    """Each micro-batch's share of the step's loss; they add up to 1.

    parts: the inputs of all micro-batches.  weight: of one of them; None for its number of rows.
    Raises: BatchError if no micro-batch has any weight.
    """
    weights = [float(weight(part)) if weight else float(len(next(iter(part.values())))) for part in parts]
    total = sum(weights)
    if total <= 0:
        raise BatchError("no token of this batch counts for the loss", hint="check Job.weight")
    return [each / total for each in weights]


def loss_gradient(loss: Tensor, microbatch: Microbatch) -> Tensor:
    """The gradient that a micro-batch's backward starts from: its share, as a scalar like the loss."""
    return torch.full((), microbatch.weight, dtype=loss.dtype, device=loss.device)


Round: TypeAlias = tuple[Mapping[int, Tensor], Sequence[Microbatch]]
"""The losses of a round by micro-batch, none but on the loss stage's rank; and its micro-batches."""


def read_loss(rounds: Sequence[Round], device: torch.device, *others: Tensor) -> list[float]:
    """This rank's part of a step's loss, and other scalars, read as `read_scalars` does."""
    losses = [loss for losses, _ in rounds for loss in losses.values()]
    numbers = iter(read_scalars([*losses, *others], device))
    loss = sum(sum(next(numbers) * microbatches[m].weight for m in losses) for losses, microbatches in rounds)
    return [loss, *numbers]


def read_scalars(scalars: Sequence[Tensor], device: torch.device) -> list[float]:
    """Numbers of a device, in one copy. The host waits until the device has done all that it was given so
    far, so a step calls this once, at its end, on all ranks: marks of a `Clock` are then read without a wait.
    """
    now = torch.zeros((), device=device)
    numbers: list[float] = torch.stack([*(scalar.reshape(()) for scalar in scalars), now]).tolist()
    return numbers[:-1]
