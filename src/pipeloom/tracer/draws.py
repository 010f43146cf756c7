"""The random numbers that one run draws, drawn again by another, so that the two can be compared.

A pipeline seeds each random call by its name in the graph, plain PyTorch draws from one stream. So the state
of the generator in front of each draw is written down in one run, and put back in front of the same draw of
the other. Draws are those of ATen calls below autograd, where a graph's call and the module's are alike.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .random import call_draws
from .tensors import tensors_of


class OtherDraws(Exception):
    """A run does not draw what the recorded one drew."""


class DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what the CPU's generator draws, in order. draws: (what was drawn, state before it)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not call_draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        state = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        self.draws.append((_described(func, result), state))
        return result


class DrawReplay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a run draw the same, in the same order.

    Raises: OtherDraws, where it draws another number next, or by `require_all` if some are left.

    >>> with DrawRecorder() as recorder:
    ...     first = torch.rand(3)
    >>> with DrawReplay(recorder.draws) as replay:
    ...     torch.equal(torch.rand(3), first)
    True
    >>> replay.require_all()
    """

    def __init__(self, draws: list[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not call_draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if self._next == len(self._draws):
            raise OtherDraws(f"the module draws {func} as number {self._next + 1}, its graph does not")
        expected, state = self._draws[self._next]
        torch.default_generator.set_state(state)
        result = func(*args, **(kwargs or {}))
        if _described(func, result) != expected:
            raise OtherDraws(f"the module draws other numbers in {func}, as number {self._next + 1}")
        self._next += 1
        return result

    def require_all(self) -> None:
        if self._next < len(self._draws):
            raise OtherDraws(
                f"the module draws {self._next} times, its captured graph {len(self._draws)} times"
            )


def _described(func: Any, result: Any) -> str:
    """What was drawn: the mask of a dropout, whichever call makes it, or else the numbers."""
    drawn = tensors_of(result)[-1]
    if "dropout" in str(func) or "bernoulli" in str(func):
        drawn = drawn != 0
    numbers = drawn.detach().reshape(-1).contiguous()  # one dimension at least, to be looked at as bytes
    return f"{list(drawn.shape)} {crc32(numbers.view(torch.uint8).numpy().tobytes())}"
