"""A rank's parameters, buffers, gradients and optimizer.

Gradients are added into buffers that live as long as the parameters do, as soon as a backward makes them:
no second copy of a stage's gradients ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tracer import Sink

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Gradients(Sink):
    """Sums of gradients by FQN. The first of a step overwrites what was there."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.sums: dict[str, Tensor] = {
            name: torch.zeros_like(p, memory_format=torch.preserve_format)
            for name, p in params.items()
            if p.requires_grad
        }
        self.touched: set[str] = set()

    def add(self, name: str, grad: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter."""
        if name in self.touched:
            self.sums[name].add_(grad)
        else:
            self.sums[name].copy_(grad)
            self.touched.add(name)

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add one micro-batch's gradient of a matrix as the product that it is."""
        if name in self.touched:
            self.sums[name].addmm_(left, right)
        else:
            torch.mm(left, right, out=self.sums[name])
            self.touched.add(name)

    def total(self, name: str) -> Tensor:
        """The sum, zero if nothing was added."""
        if name not in self.touched:
            self.sums[name].zero_()
            self.touched.add(name)
        return self.sums[name]

    def clear(self) -> None:
        self.touched.clear()


class Weights:
    """What the stages of one rank own.

    keep_gradients: copy each step's gradients to `last_gradients` before the optimizer sees them.
    device: of the rank, which may own nothing.
    `state(microbatch)` is the mapping that an action on this micro-batch reads; with the flush policy it is
    the same for all micro-batches of a step.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        optimizer: MakeOptimizer | None,
        *,
        keep_gradients: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = dict(params)
        self.buffers = dict(buffers)
        self.grads = Gradients(self.params)
        trained = [p for p in self.params.values() if p.requires_grad]
        make = optimizer or default_optimizer
        self.optimizer = make(trained) if trained else None
        self.keep_gradients = keep_gradients
        self._device = device
        self.last_gradients: dict[str, Tensor] = {}
        self._state: dict[str, Tensor] = {**self.params, **self.buffers}

    def state(self, microbatch: int) -> Mapping[str, Tensor]:
        return self._state

    def replace_buffer(self, name: str, value: Tensor) -> None:
        """A forward made the next state of a buffer."""
        self.buffers[name] = self._state[name] = value

    def norm_squares(self, names: Iterable[str]) -> Tensor:
        """Sum of squares of some gradients, in float64 (float32 where there is no float64)."""
        norms = [torch.linalg.vector_norm(self.grads.sums[n]) for n in names if n in self.grads.touched]
        if norms:
            return torch.stack(norms).double().square().sum()
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def scale_gradients(self, factor: float) -> None:
        for name in self.grads.touched:
            self.grads.sums[name].mul_(factor)

    def step(self) -> None:
        """Apply the optimizer to the gradients of this step, then forget them."""
        if self.keep_gradients:
            self.last_gradients = {n: self.grads.sums[n].clone() for n in sorted(self.grads.touched)}
        if self.optimizer is None:
            return
        for name, param in self.params.items():
            param.grad = self.grads.sums[name] if name in self.grads.touched else None
        self.optimizer.step()
        self.discard_gradients()

    @property
    def step_bytes(self) -> int:
        """Scratch of `step`: optimizers update one parameter at a time, each with a temporary tensor."""
        return max((p.nbytes for p in self.params.values() if p.requires_grad), default=0)

    def discard_gradients(self) -> None:
        for param in self.params.values():
            param.grad = None
        self.grads.clear()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            "parameters": _bytes(self.params.values()),
            "gradients": _bytes(self.grads.sums.values()),
            "buffers": _bytes(self.buffers.values()),
            "optimizer": _bytes(optimizer_tensors(self.optimizer)),
        }


def default_optimizer(params: Iterable[nn.Parameter]) -> Optimizer:
    """What a job without an optimizer gets: AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(params, lr=1e-3)


def optimizer_tensors(optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    if optimizer is None:
        return []
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def clip_factor(norm: float, limit: float) -> float:
    """Factor for all gradients so that their global norm is at most `limit`.

    The same rule as `torch.nn.utils.clip_grad_norm_`.

    >>> clip_factor(0.5, 1.0)
    1.0
    """
    return min(1.0, limit / (norm + 1e-6))
