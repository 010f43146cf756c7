"""Models that torch.export can capture, and whose values were mistaken: names, layouts, modes, draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from batches import normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .case import ANYWHERE, CLASSES, WIDTH, WORDS, Block, Case, Stack, images, series, words


class Into(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)


class NamedLikeOps(Into):
    """`mean` is a buffer, `mul` a parameter, and both are what ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.mul = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("mean", torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into((x - self.mean) * self.mul)
        middle = h.mean(0)
        return ((h - self.mean).sin() * middle * self.mul + middle).square().mean()


class EntriesNamedLikeOps(Into):
    def forward(self, sin: Tensor, linear: Tensor) -> Tensor:
        return ((self.into(sin).sin() + sin) * linear).cos().square().mean()


class Conjugates(Into):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.into(x).reshape(-1, 2, 2)).t()
        power = (h @ h.conj().t()).imag.sin()
        made = torch.view_as_real(h.mH.resolve_conj()).cos()
        return power.mean() + h.conj().imag.tanh().sum() + made.mean()


class ChannelsOfASeries(nn.Module):
    """Features of a series are normalised as channels, as in many models of sound and time."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.into(x).transpose(1, 2)).transpose(1, 2)
        return self.out(F.logsigmoid(h.transpose(1, 2)).transpose(1, 2)).square().mean()


class Rolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(1, 4, 1), nn.Linear(80, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x[:, None]).roll(1, 2).flatten(1)).square().mean()


class TurnedParameters(nn.Module):
    """Parameters and a buffer that lie transposed, and reach ops that see them as matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last) * 0.1)
        self.turned = nn.Parameter(torch.randn(2, 5, 4).permute(2, 0, 1) * 0.3)
        self.register_buffer("seen", torch.zeros(5, 2).t())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.einsum("bchw,ochw->bo", x, self.filters).sin()
        found = torch.einsum("bo,oij->bij", h, self.turned)
        if self.training:
            self.seen.mul_(0.9).add_(found.detach().mean(0))
        flat = self.turned.reshape(8, 5) @ self.seen.reshape(-1, 5).t()
        return found.square().mean() + flat.cos().mean()


class TurnedValues(nn.Module):
    """Heads that are transposed, cut apart and expanded in front of reshapes that have to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.into(x).view(rows, length, 3, 2, 4).unbind(2)
        gates = (q.transpose(1, 2) * k.transpose(1, 2)).softmax(-1)
        heads = v.transpose(1, 2).reshape(2 * rows, length, 4) * gates.reshape(2 * rows, length, 4)
        mixed = heads.view(rows, 2, length, 4).transpose(1, 2).reshape(rows, length, 8)
        shared = mixed[:, :, None, :4].expand(rows, length, 2, 4).reshape(rows, length, 8)
        wide = self.scale * (mixed + shared)[:, 1:].reshape(-1, 8)
        return self.out(wide).view(rows, -1, 8).transpose(0, 1).tanh().square().mean()


LENGTH, HEADS, ATTENTION = 12, 4, 16


class Products(nn.Module):
    """Subclasses multiply operands that do not lie in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(ATTENTION, 3 * ATTENTION), nn.Linear(ATTENTION, ATTENTION)
        self.along, self.plain = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH, bias=False)

    def heads(self, x: Tensor) -> list[Tensor]:
        rows, length, _ = x.shape
        return [p.view(rows, length, HEADS, -1).transpose(1, 2) for p in self.into(x).split(ATTENTION, 2)]

    def join(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.out(x.transpose(1, 2).flatten(2)))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mix(torch.tanh(x))).square().mean()


class Attention(Products):
    """As it is written where there is no fused one."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.join((q @ k.transpose(-2, -1)).softmax(-1) @ v)


class SharedHead(Products):
    """One head of keys and values for all: they are expanded."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.join((q @ k[:, :1].mT).softmax(-1) @ v[:, :1])


class Einsum(Products):
    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(2, (HEADS, -1)) for p in self.into(x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return cast(Tensor, self.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2)))


class Mixer(Products):
    """Linear layers along the other dimension, one with a bias and one without; a matrix from the left."""

    def mix(self, x: Tensor) -> Tensor:
        turned = self.plain(torch.tanh(self.along(self.into(x).transpose(1, 2))))
        return cast(Tensor, self.out((self.plain.weight @ turned.transpose(1, 2))[..., :ATTENTION]))


class Encoder(Products):
    """PyTorch's own: its attention turns what it gets."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            ATTENTION, HEADS, 2 * ATTENTION, self.dropout, batch_first=True
        )

    def mix(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.into(x)[..., :ATTENTION]))  # type: ignore[no-any-return]


class DroppingEncoder(Encoder):
    """On the CPU its attention runs as separate products, which do not have to copy the values."""

    dropout = 0.1


class AssignsAPart(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 4:] = h[:, :4].exp()
        h[:, 0] = 1.0
        return super().run(h)


class PlainAttributes(Stack):
    def prepare(self) -> None:
        self.scale, self.shift = torch.full((WIDTH,), 0.5), torch.randn(WIDTH)

    def run(self, h: Tensor) -> Tensor:
        return super().run(h * self.scale + self.shift)


class CountsRows(Stack):
    """Its forward makes a constant that depends on the size of the batch."""

    def run(self, h: Tensor) -> Tensor:
        return super().run(h) / torch.tensor(float(len(h)))


class FourierModes(Stack):
    """Keeps the low frequencies, as Fourier neural operators do."""

    def prepare(self) -> None:
        self.mix = nn.Parameter(torch.randn(3, 3, dtype=torch.cdouble) / 3)

    def run(self, h: Tensor) -> Tensor:
        modes = torch.fft.rfft(super().run(h))
        kept = torch.zeros_like(modes)
        kept[:, :3] = modes[:, :3] @ self.mix
        kept[:, -1] = modes[:, 0].conj()
        return torch.fft.irfft(kept, n=WIDTH)


class Solves(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        return torch.linalg.solve(h[:, :, None] * h[:, None] + torch.eye(WIDTH, dtype=h.dtype), h)


class DrawsByItsGenerator(Stack):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h + torch.rand(WIDTH, generator=torch.Generator().manual_seed(1), dtype=h.dtype))


class AsksForTheMode(Stack):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h * 2 if self.training else h)


class FrozenStatistics(Stack):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def run(self, h: Tensor) -> Tensor:
        return super().run(self.norm(h))


class StochasticDepth(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        drawn = h * torch.bernoulli(torch.full((len(h), 1), 0.5)) * 2 if self.training else h
        return self.blocks[1](drawn)


class AlphaDropout(Stack):
    def run(self, h: Tensor) -> Tensor:
        return super().run(F.alpha_dropout(h, 0.5, self.training))


class RecurrentDropout(Stack):
    def prepare(self) -> None:
        self.cells = nn.LSTM(4, 4, 3, dropout=0.5, batch_first=True)

    def run(self, h: Tensor) -> Tensor:
        return super().run(self.cells(h.view(-1, 2, 4))[0].flatten(1))


class Noisy(Stack):
    """Draws where no gradient flows: noise on the input, and a mask of its own."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x + torch.randn_like(x), y)

    def run(self, h: Tensor) -> Tensor:
        h = super().run(h)
        return h * (torch.rand_like(h) > 0.2)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: bool) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.cells(x)[0][:, -1]), y)


class HeadsForSeveralTokens(nn.Module):
    """As DeepSeek-V3's: a block for each word further ahead joins the state with the embedding of the word
    before, and all share the embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(2))
        self.further = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.block(self.embed(ids))
        loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())
        for ahead, (join, block) in enumerate(zip(self.joins, self.further, strict=True), start=1):
            next_words = self.embed(ids[:, ahead:])
            h = block(join(torch.cat([h[:, :-1], next_words], dim=-1)))
            loss = loss + 0.3 * F.cross_entropy(self.head(h).flatten(0, 1), labels[:, ahead:].flatten())
        return {"loss": loss}


def parametrised(how: Callable[..., nn.Module]) -> nn.Module:
    model = Stack()
    for block in model.blocks:
        how(block.net[0])
    return model


NAMES = "values had the names of parameters or entries: a stage that got both took one for the other"
KERNELS = "kernels lay what they make otherwise than the fake ones that stages are traced with"
PRODUCTS = "products copy operands that do not lie in one piece"
MODES = "evaluation was the training graph with the flags of known calls turned off"
CHANGES = "the forward of a parametrisation changes buffers, in training mode only"
ROWS_OF_HEADS = normal(x=(LENGTH, ATTENTION))

CASES = [
    Case(NamedLikeOps, NAMES, batch=normal(x=(4,)), cuts=(2, "anywhere")),
    Case(EntriesNamedLikeOps, NAMES, batch=normal(sin=(4,), linear=(4,)), cuts=ANYWHERE, slow=True),
    Case(Conjugates, "marked conjugates could not be sent", batch=normal(x=(4,)), cuts=ANYWHERE, slow=True),
    Case(ChannelsOfASeries, KERNELS, batch=normal(x=(5, 4)), cuts=ANYWHERE, slow=True),
    Case(Rolled, KERNELS, batch=normal(x=(5, 4)), cuts=ANYWHERE, slow=True),
    Case(TurnedParameters, "traced as straight", batch=images, cuts=(3, "anywhere"), evaluated=False),
    Case(TurnedValues, "arrived otherwise", batch=normal(x=(6, 8)), cuts=("around", "anywhere"), slow=True),
    *(
        Case(model, PRODUCTS, batch=ROWS_OF_HEADS, cuts=(3, "anywhere"), slow=model is not SharedHead)
        for model in (Attention, SharedHead, Einsum, Mixer, Encoder)
    ),
    Case(DroppingEncoder, PRODUCTS, batch=ROWS_OF_HEADS, expect="random", slow=True),
    Case(HeadsForSeveralTokens, "embedding and tied head are read at three depths", batch=words, cuts=(3, 6)),
    Case(AssignsAPart, "assignments to parts become `aten.copy`, which has no derivative", cuts=(2, 1)),
    Case(PlainAttributes, "tensors that are plain attributes were fake at run time", cuts=(2, 1), slow=True),
    Case(CountsRows, "a constant that depends on the size of the micro-batch", slow=True),
    Case(FourierModes, "complex values, whose parts are assigned to, between stages", cuts=(3, "anywhere")),
    Case(Solves, "an op that checks its result ended in a traceback", between="checks a result"),
    Case(DrawsByItsGenerator, "an object that is no tensor ended in a traceback", between="a Generator"),
    Case(AsksForTheMode, MODES, cuts=(2, 1)),
    Case(FrozenStatistics, MODES, cuts=(2, 1), slow=True),
    Case(StochasticDepth, MODES, expect="random", cuts=(2, 4)),
    Case(AlphaDropout, MODES, expect="random", cuts=(2, 4), slow=True),
    Case(RecurrentDropout, MODES, expect="random", between="dropout between", cuts=(2, 4), slow=True),
    Case(Noisy, "drew without a seed", expect="random, in evaluation too", cuts=(2, 99)),
    *(
        Case(partial(Recurrent, kind, **how), "PyTorch's own layer", name=name, batch=series, slow=True)
        for name, kind, how in (("LSTM", nn.LSTM, {}), ("bidirectional GRU", nn.GRU, {"bidirectional": True}))
    ),
    *(
        Case(partial(parametrised, how), CHANGES, name=name, cuts=(2, 3), slow=name != "spectral norm")
        for name, how in {
            "weight norm": parametrizations.weight_norm,
            "spectral norm": parametrizations.spectral_norm,
            "orthogonal": parametrizations.orthogonal,
        }.items()
    ),
]
