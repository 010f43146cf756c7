"""Python values that glue reads from tensors, as numbers that can be sent to other stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import CaptureError

_WHOLE = frozenset({"tolist", "numpy", "__array__"})
_YES_OR_NO = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})


def count_of(name: str, tensor: Tensor) -> int:
    """How many numbers a read of `tensor` gives."""
    return tensor.numel() if name in _WHOLE else 1


def numbers_of(result: Any) -> list[float]:
    """The numbers in the result of a read.

    >>> numbers_of([[1, 2], [3, 4]]), numbers_of(True)
    ([1, 2, 3, 4], [True])

    Raises: CaptureError for numbers that 64-bit floats cannot hold.
    """
    numbers = list(_flat(result.tolist() if hasattr(result, "tolist") else result))
    for number in numbers:
        if isinstance(number, complex) or (isinstance(number, int) and abs(number) > 2**53):
            raise CaptureError(
                f"the forward decides between modules on the number {number}, which cannot be sent",
                hint="move this code into a module of its own",
            )
    return numbers


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def convert(name: str, numbers: Sequence[float], tensor: Tensor) -> Any:
    """The result of the read `name` of a tensor of this shape and dtype, from its numbers.

    >>> convert("item", [3.0], torch.zeros((), dtype=torch.int64))
    3
    """
    if name in _YES_OR_NO:
        return bool(numbers[0])
    if name in ("__int__", "__index__"):
        return int(numbers[0])
    if name == "__float__":
        return float(numbers[0])
    whole = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device="cpu")
    whole = whole.to(tensor.dtype).reshape(tensor.shape if name in _WHOLE else ())
    return whole.item() if name == "item" else whole.numpy() if name != "tolist" else whole.tolist()
