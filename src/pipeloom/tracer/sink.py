"""Where a backward puts the gradients of parameters."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Sink(Protocol):
    """Sums gradients by FQN; it must not keep the tensor it is given."""

    def add(self, name: str, grad: Tensor) -> None: ...


def add_gradient(sink: Sink, name: str, grad: Tensor) -> None:
    """A call in a backward graph: the gradient of parameter `name` is ready."""
    sink.add(name, grad)
