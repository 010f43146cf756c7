"""Tensors to run one op of a captured graph on, as it would find them in a training step.

Shapes, strides and dtypes are those of the capture. Floating-point numbers are random between 0.1 and 1.1,
so that logarithms and roots are defined. What decides how much work an op does is real: batch inputs if a
batch is given, constants, and what cheap ops make of them (masks, positions). Other integers are 0, a valid
index anywhere, and other masks are true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.graph import views_of_state
from ..tracer.captured import Captured

DRAWN = 1 << 20
"""Random numbers drawn for one tensor; a larger one repeats them."""


class OpArguments:
    """Makes the arguments of ops, on one device.

    batch: a real micro-batch, or nothing.
    """

    def __init__(self, captured: Captured, device: torch.device, batch: Mapping[str, Tensor]) -> None:
        self.captured = captured
        self.device = device
        self.batch = batch
        self.state = views_of_state(captured.graph)
        self.values: dict[fx.Node, Any] = {}
        self.random = torch.Generator().manual_seed(0)

    def name(self, node: fx.Node) -> str:
        """The FQN, batch input or value that a node stands for."""
        return self.captured.targets.get(node.name, node.name)

    def role(self, node: fx.Node) -> str:
        """How the gradient of an argument counts: "weight", "value", or "none" if there is none."""
        graph, name = self.captured.graph, self.name(node)
        if name in graph.parameter:
            return "weight" if graph.parameter[name].trainable else "none"
        if node.op == "placeholder" or not graph.value[name].needs_grad:
            return "none"
        return "weight" if name in self.state else "value"

    def is_state(self, node: fx.Node) -> bool:
        """Whether an argument's storage is a parameter's or buffer's, which is there anyway."""
        name = self.name(node)
        graph = self.captured.graph
        return name in graph.parameter or name in graph.buffer or name in self.state

    def of(self, node: fx.Node) -> dict[fx.Node, Tensor]:
        """One tensor per argument node; those with a gradient are leaves that require it."""
        tensors = {source: self._tensor(source) for source in dict.fromkeys(node.all_input_nodes)}
        if "grouped_mm" in str(node.target):
            _spread_groups(node, tensors)
        return {
            source: tensor.requires_grad_(self.role(source) != "none") for source, tensor in tensors.items()
        }

    def named(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by the names of parameters, buffers, batch inputs and values, none for a name that nothing
        reads; none of them requires a gradient."""
        nodes = {self.name(node): node for node in self.captured.module.graph.nodes if node.op != "output"}
        return {name: self._tensor(nodes[name]) for name in names if name in nodes}

    def _tensor(self, node: fx.Node) -> Tensor:
        real = self._real(node)
        if isinstance(real, Tensor):
            return real.detach().to(self.device, copy=True)
        return self._invented(node.meta["val"]).to(self.device)

    def _real(self, node: fx.Node) -> Any:
        """The value itself where it follows from the batch and constants by cheap ops, else None."""
        if node not in self.values:
            self.values[node] = self._evaluate(node)
        return self.values[node]

    def _evaluate(self, node: fx.Node) -> Any:
        graph, name = self.captured.graph, self.name(node)
        if node.op == "placeholder":
            real = self.captured.constants if name in self.captured.constants else self.batch
            return real.get(name)
        source = node.args[0] if node.target is getitem else node
        assert isinstance(source, fx.Node)
        if node.target is getitem:
            whole = self._real(source)
            return None if whole is None else whole[node.args[1]]
        if not graph.op[node.name].cheap:
            return None
        args = {n: self._real(n) for n in node.all_input_nodes}
        args = {n: self._invented(n.meta["val"]) if v is None else v for n, v in args.items()}
        return call_node(node, args)

    def _invented(self, like: Tensor) -> Tensor:
        """A tensor of the same layout; overlapping elements (expanded dimensions) share their number."""
        size = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True) if n > 0)
        if like.dtype == torch.bool:
            flat = torch.ones(size, dtype=torch.bool)
        elif like.dtype.is_floating_point or like.dtype.is_complex:
            flat = self._random_numbers(size).to(like.dtype)
        else:
            flat = torch.zeros(size, dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _random_numbers(self, size: int) -> Tensor:
        """Numbers of [0.1, 1.1). From the million-th on they repeat: no kernel's time depends on that, and to
        draw those of a large embedding takes longer than to measure it."""
        drawn = torch.rand(min(size, DRAWN), generator=self.random) + 0.1
        return drawn if size <= DRAWN else drawn.repeat(-(-size // DRAWN))[:size]


def call_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Run one node on the given argument values, on the device that they are on."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    if "device" in kwargs:
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        kwargs = {**kwargs, "device": tensors[0].device if tensors else torch.device("cpu")}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _spread_groups(node: fx.Node, tensors: dict[fx.Node, Tensor]) -> None:
    """Give each expert of a grouped product an equal share of the rows: the ends of the groups."""
    rows = next(t.shape[0] for t in tensors.values() if t.ndim == 2)
    for source, tensor in tensors.items():
        if tensor.dtype == torch.int32 and tensor.ndim == 1:
            ends = torch.arange(1, len(tensor) + 1) * rows // len(tensor)
            tensors[source] = ends.to(tensor)
