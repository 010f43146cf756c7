"""Models whose forward decides on data, or does in Python what torch.export cannot trace. Most are cut
between their modules, and a cut must not break what the forward does there."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from batches import normal
from torch import Tensor, nn

from .case import CLASSES, WIDTH, WORDS, Between, Block, Case, Deciding, Scores, Stack, images, words


class BranchBetween(Stack):
    def run(self, h: Tensor) -> Tensor:
        if h.sum() > 0:
            h = -h
            h = self.blocks[0](h)
        else:
            h = self.blocks[1](h)
        h = self.blocks[2](h)
        return h * 0.5 if h.mean() > 0.1 else h


class ItemLoop(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(int(x.abs().sum().item()) % 3 + 1):
                x = super().forward(x)
            return x

    def prepare(self) -> None:
        self.tail = Block()

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        for _ in range(int(h.abs().sum().item()) % 3):
            h = self.tail(h)
        while h.norm() > 4:
            h = h / 2
        return h


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """With its shares."""
        shares = self.router(x).softmax(-1)
        best = shares.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (best == index).nonzero().squeeze(-1)
            if len(chosen):
                out[chosen] = expert(x[chosen]) * shares[chosen, index, None]
        return x + out, shares


class Experts(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x, shares = self.routed(x)
        self.balance = shares.mean(0).square().sum()
        return x


class MixtureOfExperts(Stack):
    block = Experts

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = super().forward(x, y)["loss"]
        for block in self.blocks:
            loss = loss + 0.1 * block.balance
        return {"loss": loss}


class TiedWords(Between):
    def prepare(self) -> None:
        self.inlet, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.position = nn.Parameter(torch.randn(6, WIDTH) * 0.1)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = self.inlet(ids) + self.position
        for block in self.blocks:
            x = x + block(x) * self.scale[0]
        return F.linear(self.head(x), self.inlet.weight) * self.scale[1]


class TiedHead(Between):
    def prepare(self) -> None:
        self.inlet, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.inlet.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.run(self.inlet(ids)))


class Skipping(Between):
    def prepare(self) -> None:
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def run(self, early: Tensor) -> Tensor:
        order = early.detach().argsort(-1)
        h = self.shared(early)
        half = early * 0.5
        h = self.shared(super().run(h)).gather(-1, order)
        return self.mix(h, early) + half


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = ((nn.Conv2d(n, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)) for n in (3, 6))
        self.body = nn.Sequential(*(layer for three in both for layer in three))
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


@dataclass
class Result:
    hidden: Tensor
    count: int


class Nested(Between):
    class block(Deciding):
        def forward(self, x: Tensor, more: Tensor | None = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]
            h = super().forward(x) * scale
            more = h.mean() if more is None else more + h.mean()
            return Result(h, 3), {"more": more, "count": 3, "nothing": None}

    def run(self, h: Tensor) -> Tensor:
        more = None
        for block in self.blocks:
            result, others = block(h, more, scale=0.9)
            more = others["more"]
            h = result.hidden * others["count"] / result.count
        return h + more


class EvaluatesDifferently(Between):
    class block(Deciding):
        def forward(self, x: Tensor) -> Any:
            h = super().forward(x)
            return (h, h.mean()) if self.training else (h, None)

    def prepare(self) -> None:
        self.extra = nn.Linear(WIDTH, WIDTH)

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h, more = block(h)
            if more is not None:
                h = h + more
        return h + self.extra(h) if self.training else h


class PlainTensors(Between):
    def prepare(self) -> None:
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


class InPlace(Between):
    def run(self, h: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            more = block(h)
            h = h + 0
            h += more
            h[:, index] = h[:, index] * 0.5
            h[:, index].mul_(0.5)
        return h


class ChangesItsBatch(Between):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x.mul_(2.0)
        return {"loss": F.cross_entropy(self.head(self.run(self.inlet(x)) + x), y)}


class ThroughViews(Between):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        h = h + 0
        h.view(-1)[:3].mul_(0.5)
        return self.blocks[2](self.blocks[1](h) + h)


class LeftInAList(Between):
    class block(Deciding):
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


class RoutesBetween(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.last(self.routed(self.first(x))[0])), y)}


class Branches(Between):
    def run(self, h: Tensor) -> Tensor:
        left = self.blocks[0](h)
        return left * self.blocks[2](self.blocks[1](h * 2))


class PartlyFrozen(Between):
    def prepare(self) -> None:
        self.blocks[0].requires_grad_(False)

    def run(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.blocks[1](self.blocks[0](h))
        return self.blocks[2](h)


class NoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = x @ self.weight
        if h.sum() > 0:
            h = h * 2
        return {"loss": F.cross_entropy(h, y)}


class LeavesOut(Between):
    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(Deciding(), nn.Dropout(0.2))

    def run(self, h: Tensor) -> Tensor:
        h = F.dropout(h, 0.1, self.training)
        for block in self.blocks:
            if self.training and torch.rand([]) < 0.4:
                continue
            h = F.dropout(block(h), 0.1, self.training)
        return h


class LeavesOutByPython(Between):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and random.random() < 0.4:
                continue
            h = block(h)
        return h


class LayerDrop(Stack):
    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and random.random() < 1e-12:
                continue
            h = block(h)
        return h


def scaled_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(outputs, batch["y"])
    return loss * (1 + loss.item())


class Positions(Stack):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h) + (h > 0).nonzero().sum()


class Looks(Stack):
    def run(self, h: Tensor) -> Tensor:
        h.detach().sum().item()
        return super().run(h)


class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.layers = [{"keys": keys}]


class Reads(nn.Module):
    def forward(self, h: Tensor, cache: Cache) -> Tensor:
        return h + cache.layers[0]["keys"]


class Prefixed(Stack):
    def prepare(self) -> None:
        self.prefix = nn.Linear(WIDTH, WIDTH)
        self.reads = Reads()

    def run(self, h: Tensor) -> Tensor:
        cache = Cache(self.prefix(h) * 2)
        h = self.blocks[1](self.blocks[0](h))
        if h.sum() > 1e9:
            h = -h
        return self.blocks[2](self.reads(h, cache))


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.into(x * 2 if float(x.detach().sum()) > 1e9 else x)


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.audio, self.both = Undecided(), Undecided(), Undecided()

    def forward(self, text: Tensor, audio: Tensor) -> Tensor:
        seen = self.text(text) * self.audio(audio)
        return (self.both(seen + text) + audio).square().mean()


class NamedLikeAnEntry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.second((self.first(x * self.scale) * scale).sin()).square().mean()


class GivesANumber(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        return super().forward(x), 1.0


class ComparesANumber(Between):
    def prepare(self) -> None:
        self.first = GivesANumber()

    def run(self, h: Tensor) -> Tensor:
        h, scale = self.first(h)
        h = self.blocks[0](h)
        if not self.training and scale == 1.0:
            h = h * 2
        return self.blocks[1](h)


class ComparesWithText(ComparesANumber):
    def run(self, h: Tensor) -> Tensor:
        h, scale = self.first(h)
        h = self.blocks[0](h)
        if scale in (None, "skip") or scale == "double":
            return h
        return self.blocks[1](h) if scale != "x" else h


class FillsAList(Between):
    class block(Deciding):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            losses.append(x.square().mean())
            return x

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        losses: list[Tensor] = []
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h, losses)
        return {"loss": F.cross_entropy(self.head(h), y) + sum(losses)}


class FillsADictionary(Between):
    class block(Deciding):
        def forward(self, given: dict[str, Any]) -> Any:  # type: ignore[override]
            given["h"] = super().forward(given["h"]) * given["scale"]
            given["means"].append(given["h"].mean())

    def run(self, h: Tensor) -> Tensor:
        means = deque[Tensor]()
        given = OrderedDict(h=h, means=means, scale=0.9)
        for block in self.blocks:
            block(given)
        return given["h"] * given["scale"] + sum(means)


class ReturnsWhatItFills(FillsADictionary):
    class block(FillsADictionary.block):
        def forward(self, given: dict[str, Any]) -> Any:
            given.setdefault("first", given["h"] * 2)
            super().forward(given)
            return given

    def run(self, h: Tensor) -> Tensor:
        given = {"h": h, "means": [], "scale": 0.9}
        for block in self.blocks:
            given = block(given)
        return given["h"] + given["first"]


class ThrowsAwayWhatItFills(Between):
    class block(Deciding):
        def forward(self, x: Tensor, means: list[Tensor], more: dict[str, float]) -> Tensor:  # type: ignore[override]
            x = super().forward(x) * more.pop("scale")
            means.append(x.mean())
            return x + means[0]

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h, [], {"scale": 0.9})
        return h


class ComparesByName(Between):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h if torch.equal(input=h, other=h.abs()) else h * 2)


class DrawsByATensor(Between):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h * torch.empty_like(h).bernoulli_(torch.full_like(h, 0.5)))


class Moves(Between):
    """As a forward does that was written for several devices."""

    def run(self, h: Tensor) -> Tensor:
        self.blocks[0].to(h.device)
        for block in self.blocks:
            h = block.to(h)(h)
        return h


class MovesInside(Stack):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.net.cpu()(x))


class Converts(Stack):
    def run(self, h: Tensor) -> Tensor:
        return self.blocks[0].bfloat16()(h.bfloat16()).to(h)


class TorchCond(Stack):
    def run(self, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, self.blocks[0], self.blocks[1], (h,))


def scripted() -> nn.Module:
    model = Stack()
    model.blocks[1] = torch.jit.script(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return model


CUTS = (3, 2, 1, 4)
LINE = r"control_flow\.py:\d+\)"
NAMES = "a parameter named like a batch entry: one was taken for the other"
LOST = "the change was lost, or refused"
TEXT, SCALE = normal(text=(4,), audio=(4,)), normal(x=(4,), scale=(4,))
OF_WORDS = {"batch": words, "loss": lambda logits, batch: F.cross_entropy(logits.mT, batch["labels"])}

apart = partial(Case, between="data")
"""A model that decides on data."""

everywhere = partial(apart, cuts=CUTS)

CASES = [
    everywhere(Between, "every block decides on data", name="branch in blocks", slow=True),
    Case(BranchBetween, "decides what it calls", name="branch between blocks", between=LINE, cuts=CUTS),
    everywhere(ItemLoop, "loops by data", name="loops by item", slow=True),
    everywhere(MixtureOfExperts, "routes in Python, and leaves a loss", name="experts", slow=True),
    everywhere(
        TiedWords, "one embedding, read between modules too", name="tied in glue", **OF_WORDS, slow=True
    ),
    everywhere(
        TiedHead,
        "a parameter in two modules, and rows that count differently",
        name="tied modules",
        weight=lambda batch: (batch["labels"] > 2).sum(),
        slow=True,
        **OF_WORDS,
    ),
    everywhere(Skipping, "values pass over stages, one without gradient", name="skips"),
    everywhere(Normed, "BatchNorm and ReLU in place", name="batch norm", batch=images, slow=True),
    apart(Nested, "keyword arguments, nested results, dataclasses, numbers and None among them"),
    apart(EvaluatesDifferently, "modules return something else in evaluation mode"),
    apart(PlainTensors, "tensors that are neither parameters nor buffers, and NumPy"),
    apart(InPlace, "changes what modules gave, and views of it", slow=True),
    apart(ChangesItsBatch, "the batch is changed once for each stage", cuts=(2,)),
    apart(ThroughViews, "what is sent was changed through a view before"),
    apart(LeftInAList, "modules leave tensors where no other stage sees them", slow=True),
    apart(RoutesBetween, "sizes between modules depend on data", slow=True),
    apart(Branches, "two branches without order between them", slow=True),
    apart(PartlyFrozen, "no gradient flows through the first half"),
    apart(NoModules, "all parameters are the model's own: one stage", cuts=(1,)),
    apart(LeavesOut, "layers left out by PyTorch", expect="random", cuts=(2, 4)),
    Case(LeavesOutByPython, "by Python's numbers", expect="random", between=".", cuts=(4, 2), slow=True),
    Case(LayerDrop, "Python's random numbers, nothing left out", between="random numbers", slow=True),
    Case(
        Scores,
        "`.item()` in the loss ended in a traceback of torch's",
        name="number read in the loss",
        between=LINE,
        loss=scaled_loss,
        cuts=(2, 3),
    ),
    Case(Positions, "sizes that nothing is decided on ended in a traceback", between=LINE, cuts=(2, 3)),
    Case(Looks, "a number that is only looked at was an obstacle"),
    apart(
        Prefixed,
        "parameters behind a tensor in an object that a module gets were not trained, without a word",
        cuts=(3, "anywhere"),
    ),
    apart(Encoders, "submodules named like entries", batch=TEXT, cuts=("anywhere",), slow=True),
    Case(NamedLikeAnEntry, NAMES, between="of that name", batch=SCALE, cuts=("anywhere",), slow=True),
    apart(ComparesANumber, "a number of another stage was equal to none, without a word"),
    apart(ComparesWithText, "a number of another stage is no text"),
    apart(FillsAList, LOST),
    apart(FillsADictionary, LOST),
    apart(ReturnsWhatItFills, LOST),
    apart(ThrowsAwayWhatItFills, LOST),
    Case(ComparesByName, "ended in an IndexError", between="equal"),
    apart(DrawsByATensor, "ended in an error of torch", expect="random, in evaluation too"),
    apart(Moves, "moving a module ended in a KeyError"),
    Case(MovesInside, "moving a module ended in a KeyError"),
    Case(
        Converts, "converting a module ended in a KeyError", expect="refused: converts", hint="model is made"
    ),
    Case(TorchCond, "it was told of dispatch modes", expect="refused: calls torch's cond", hint="of Python"),
    Case(scripted, "a part in TorchScript", name="TorchScript part", between=".", slow=True),
]
JOBS = {str(case): case.job for case in CASES[:8]}
"""The first few, which are of all kinds."""
