"""Where a backward puts the gradients of parameters."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, fx


class Sink(Protocol):
    """Sums gradients by FQN; it must not keep the tensor it is given."""

    def add(self, name: str, grad: Tensor) -> None: ...

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add the matrix product of the two; a sink may do so without a tensor of its own for it."""
        self.add(name, left @ right)


def add_gradient(sink: Sink, name: str, grad: Tensor) -> None:
    """A call in a backward graph: the gradient of parameter `name` is ready."""
    sink.add(name, grad)


def add_product(sink: Sink, name: str, left: Tensor, right: Tensor) -> None:
    """A call in a backward graph: the gradient of parameter `name` is the matrix product of the two."""
    sink.add_product(name, left, right)


def add_products(graph: fx.Graph) -> None:
    """Let matrix products that are only gradients of a parameter be added up while they are made: no gradient
    of the size of a weight is alive besides the sum."""
    for node in graph.find_nodes(op="call_function", target=add_gradient):
        sink, name, grad = node.args
        if grad.target is torch.ops.aten.mm.default and len(grad.users) == 1:
            node.target, node.args = add_product, (sink, name, *grad.args)
            graph.erase_node(grad)
