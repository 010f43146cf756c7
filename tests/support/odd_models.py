"""Models that torch.export cannot capture, each for another reason, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom import Job

WIDTH = 8
CLASSES = 5
WORDS = 11


def vectors(seed: int, size: int) -> dict[str, Tensor]:
    """Rows of `x` are shifted up and down, two at a time, so that branches on sums go both ways."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(size, WIDTH, generator=made)
    x = x + torch.where(torch.arange(size) // 2 % 2 == 0, 1.5, -1.5)[:, None]
    return {"x": x, "y": torch.randint(0, CLASSES, (size,), generator=made)}


def words(seed: int, size: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (size, 6), generator=made)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def images(seed: int, size: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, 3, 6, 6, generator=made),
        "y": torch.randint(0, CLASSES, (size,), generator=made),
    }


class Block(nn.Module):
    """A residual block that normalises."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(self.norm(x))


class BranchInBlock(nn.Module):
    """Every block decides on data, inside itself."""

    class Deciding(Block):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                x = x * 1.5
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Deciding() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x), y)}


class BranchBetween(nn.Module):
    """The model's own forward decides on data: what it does to a tensor, and which module it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.positive = Block()
        self.negative = Block()
        self.last = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        if h.sum() > 0:
            h = -h
            h = self.positive(h)
        else:
            h = self.negative(h)
        h = self.last(h)
        if h.mean() > 0.1:
            h = h * 0.5
        return {"loss": F.cross_entropy(self.head(h), y)}


class ItemLoop(nn.Module):
    """How often a block runs depends on data."""

    class Repeating(Block):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(int(x.abs().sum().item()) % 3 + 1):
                x = super().forward(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Repeating() for _ in range(3))
        self.tail = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        for _ in range(int(x.abs().sum().item()) % 3):
            x = self.tail(x)
        while x.norm() > 4:
            x = x / 2
        return {"loss": F.cross_entropy(self.head(x), y)}


class Experts(nn.Module):
    """A mixture of experts with routing in Python; leaves its balancing loss in an attribute."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        best = shares.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (best == index).nonzero().squeeze(-1)
            if len(chosen):
                out[chosen] = expert(x[chosen]) * shares[chosen, index, None]
        self.balance = shares.mean(0).square().sum()
        return x + out


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.single = Experts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        x = self.single(x)
        loss = F.cross_entropy(self.head(x), y)
        for layer in (*self.layers, self.single):
            loss = loss + 0.1 * layer.balance
        return {"loss": loss}


class TiedWords(nn.Module):
    """Input and output embedding are one parameter; the output one is used between modules. Outputs only:
    the loss is the job's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(6, WIDTH) * 0.1)
        self.scale = nn.Parameter(torch.ones(2))
        self.blocks = nn.ModuleList(BranchInBlock.Deciding() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = x + block(x) * self.scale[0]
        return F.linear(self.norm(x), self.embed.weight) * self.scale[1]


def words_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class TiedHead(nn.Module):
    """A tied parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(BranchInBlock.Deciding() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skipping(nn.Module):
    """A value passes over stages; another one gets no gradient; a module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(BranchInBlock.Deciding() for _ in range(3))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        early = self.inlet(x)
        order = early.detach().argsort(-1)
        h = self.shared(early)
        half = early * 0.5
        for block in self.blocks:
            h = block(h)
        h = self.shared(h).gather(-1, order)
        return {"loss": F.cross_entropy(self.head(self.mix(h, early) + half), y)}


class Normed(nn.Module):
    """Convolutions with BatchNorm and in-place ReLU, and a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        if self.training:
            self.seen += 1
        if self.seen.item() % 2:
            h = h * 1.1
        h = h + 1.0
        h += h.mean()
        return {"loss": F.cross_entropy(self.head(h.mean((-1, -2))), y)}


class Dropping(nn.Module):
    """Dropout in modules and between them, and layers that are left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = F.dropout(x, 0.1, self.training)
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.3:
                continue
            x = layer(x)
        x = F.dropout(x, 0.1, self.training)
        return {"loss": F.cross_entropy(self.head(x), y)}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def job(
    model: Callable[[], nn.Module], batch: Callable[[int, int], dict[str, Tensor]] = vectors, **more: Any
) -> Job:
    return Job(model=model, batch=batch, optimizer=sgd, name=getattr(model, "__name__", "model"), **more)


JOBS = {
    "branch in blocks": job(BranchInBlock),
    "branch between blocks": job(BranchBetween),
    "loops by item": job(ItemLoop),
    "experts": job(MixtureOfExperts),
    "tied in glue": job(TiedWords, words, loss=words_loss),
    "tied modules": job(TiedHead, words, loss=words_loss, weight=lambda b: (b["labels"] > 2).sum()),
    "skips": job(Skipping),
    "batch norm": job(Normed, images),
}
