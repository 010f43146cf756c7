"""Small models whose forward does, between modules, what a cut must not break. See also `odd_models`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from odd_models import CLASSES, WIDTH, Block, BranchInBlock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):
    """Three blocks that decide on data, and a head. Subclasses say what happens between them."""

    block: Callable[[], nn.Module] = BranchInBlock.Deciding

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.run(self.inlet(x))), y)}


class _Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return -grad * x.sign()


class OwnGradient(Stack):
    """An autograd function of the user's between modules."""

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = _Backwards.apply(block(h))
        return h


class Checkpointed(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h


class CheckpointedOldWay(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h


class CheckpointedInside(Stack):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = BranchInBlock.Deciding()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)


@dataclass
class Result:
    hidden: Tensor
    count: int


class Dataclasses(Stack):
    class block(BranchInBlock.Deciding):
        def forward(self, x: Tensor) -> Result:
            return Result(super().forward(x), 2)

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            result = block(h)
            h = result.hidden / result.count
        return h


class Nested(Stack):
    """Keyword arguments, nested results, numbers and None among them."""

    class block(BranchInBlock.Deciding):
        def forward(self, x: Tensor, more: Tensor | None = None, *, scale: float = 1.0) -> Any:
            h = super().forward(x) * scale
            more = h.mean() if more is None else more + h.mean()
            return h, {"more": more, "count": 3, "nothing": None}

    def run(self, h: Tensor) -> Tensor:
        more = None
        for block in self.blocks:
            h, others = block(h, more, scale=0.9)
            more = others["more"]
            h = h * others["count"] / 3
        return h + more


class EvaluatesDifferently(Stack):
    """In evaluation mode modules return something else, and one is not called."""

    class block(BranchInBlock.Deciding):
        def forward(self, x: Tensor) -> Any:
            h = super().forward(x)
            return (h, h.mean()) if self.training else (h, None)

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h, more = block(h)
            if more is not None:
                h = h + more
        return h + self.extra(h) if self.training else h


class LeavesEarly(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
            if h.std() > 1.3:
                break
        return h


class PlainTensors(Stack):
    """Tensors that are neither parameters nor buffers; NumPy; tensors made like others."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.arange(WIDTH) / WIDTH
        self.table = [torch.ones(WIDTH), torch.randn(WIDTH)]
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def run(self, h: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            h = block(h) * self.mask + self.table[1] * self.slope
            largest = h.detach().abs().max(0).values.numpy()
            h = h / torch.from_numpy(largest.copy()).clamp(min=1)
            h = h + torch.zeros_like(h).fill_(index) + torch.arange(h.shape[1], device=h.device)
        return h


class InPlace(Stack):
    """Changes tensors that modules gave, and views of them."""

    def run(self, h: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            more = block(h)
            h = h + 0
            h += more
            h[:, index] = h[:, index] * 0.5
        return h


class ThroughViews(Stack):
    """Reads a tensor after it was changed through a view: no cut can be made while it is so."""

    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        h = h + 0
        h.view(-1)[:3].mul_(0.5)
        return self.blocks[2](self.blocks[1](h) + h)


class LeftInAList(Stack):
    """Modules leave tensors where no other stage can see them."""

    class block(BranchInBlock.Deciding):
        left: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            self.left.append(h.mean())
            return h

    def run(self, h: Tensor) -> Tensor:
        left = self.blocks[0].left
        left.clear()
        h = self.blocks[1](self.blocks[0](h))
        h = h + sum(left)
        return self.blocks[2](h)


class RoutesBetween(nn.Module):
    """A mixture of experts in the model's own forward: sizes between modules depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        shares = self.router(h).softmax(-1)
        best = shares.argmax(-1)
        out = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            chosen = (best == index).nonzero().squeeze(-1)
            if len(chosen):
                out[chosen] = expert(h[chosen]) * shares[chosen, index, None]
        return {"loss": F.cross_entropy(self.head(self.last(h + out)), y)}


class Branches(nn.Module):
    """Two branches without order between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = BranchInBlock.Deciding()
        self.b = BranchInBlock.Deciding()
        self.c = BranchInBlock.Deciding()
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        left = self.a(x)
        right = self.c(self.b(x * 2))
        return {"loss": F.cross_entropy(self.head(torch.cat([left, right], -1)), y)}


class PartlyFrozen(Stack):
    """No gradient flows through the first half."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def run(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.blocks[1](self.blocks[0](h))
        return self.blocks[2](h)


class NoModules(nn.Module):
    """All parameters are the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = x @ self.weight
        if h.sum() > 0:
            h = h * 2
        return {"loss": F.cross_entropy(h, y)}


class LeavesOut(Stack):
    """Layers are left out at random, as PyTorch draws."""

    def run(self, h: Tensor) -> Tensor:
        h = F.dropout(h, 0.1, self.training)
        for block in self.blocks:
            if self.training and torch.rand([]) < 0.4:
                continue
            h = F.dropout(block(h), 0.1, self.training)
        return h


class LeavesOutByPython(Stack):
    """The same as Python draws."""

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and random.random() < 0.4:
                continue
            h = block(h)
        return h


EXACT = [
    OwnGradient,
    Checkpointed,
    CheckpointedInside,
    Dataclasses,
    Nested,
    EvaluatesDifferently,
    LeavesEarly,
    PlainTensors,
    InPlace,
    ThroughViews,
    LeftInAList,
    RoutesBetween,
    Branches,
    PartlyFrozen,
]
"""Models that can be compared with plain PyTorch."""

RANDOM = [LeavesOut, LeavesOutByPython]
