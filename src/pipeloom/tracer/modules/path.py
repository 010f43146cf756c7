"""The way that the forward took between modules: what it read from data, and which units it called.

It goes from op to op as a tensor of fixed size, so that every stage takes the way that the first one took.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...ir.errors import CutError
from ...ir.graph import Value

PATH_PREFIX = "path:"
"""Prefix of values that carry a path from one op to the next."""

SPARE = 64
"""Room for decisions and calls that the recorded run did not take, besides as many again as it took."""


@dataclass(eq=False)
class ForwardPath:
    """decisions: numbers read, in order.  calls: units called, by their number, in order."""

    decisions: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def encode_path(path: ForwardPath, value: Value, device: torch.device) -> Tensor:
    """Counts, decisions and calls, filled up with zeros.

    Raises: CutError if there is not enough room.
    """
    numbers = [len(path.decisions), len(path.calls), *path.decisions, *path.calls]
    size = value.shape[0]
    if len(numbers) > size:
        raise CutError(
            f"the forward took {len(path.decisions)} decisions and {len(path.calls)} calls between modules, "
            f"the plan has room for {size - 2} of both",
            hint="move the loop that decides into a module of its own",
        )
    padded = [float(n) for n in numbers] + [0.0] * (size - len(numbers))
    return torch.tensor(padded, dtype=torch.float64, device=device)


def decode_path(tensor: Tensor) -> ForwardPath:
    """The path in a tensor made by `encode_path`.

    >>> value = Value(name="path:a", shape=(6,), dtype="float64")
    >>> path = decode_path(encode_path(ForwardPath([1.5], [0, 2]), value, torch.device("cpu")))
    >>> path.decisions, path.calls
    ([1.5], [0, 2])
    """
    decisions, calls, *numbers = tensor.tolist()
    first, second = int(decisions), int(decisions) + int(calls)
    return ForwardPath(numbers[:first], [int(n) for n in numbers[first:second]])
