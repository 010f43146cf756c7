"""GPT of 1.3, 2.2 and 3.8 billion parameters as in PipeDream-2BW (arXiv 2006.09503), in half precision.

As Megatron-LM had it in 2020: attention in separate products, dropout, the embedding tied to the head. For
`pipeloom plan bench/gpt_shapes.py:gpt_2_2b` as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job

VOCABULARY, LENGTH, DROPOUT = 51200, 512, 0.1

STATE_BYTES = 8.0
"""Bytes of optimizer state per byte of half-precision parameters: float32 master and gradient, and Adam's two
moments, 16 bytes for 2 (what the released code keeps with a flush)."""


@dataclass(frozen=True)
class GptShape:
    layers: int
    hidden: int
    heads: int


SHAPES = {
    "1.3B": GptShape(24, 2048, 16),
    "2.2B": GptShape(32, 2304, 32),
    "3.8B": GptShape(32, 3072, 32),
}


class Block(nn.Module):
    """Shapes: B batch, S sequence, D hidden, H heads."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        hidden, self.heads = shape.hidden, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_BSD: Tensor, future_SS: Tensor) -> Tensor:
        b, s, d = x_BSD.shape
        heads = self.qkv(self.norm1(x_BSD)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (d // self.heads) ** -0.5
        weights = self.dropout(scores.masked_fill(future_SS, float("-inf")).softmax(-1))
        mixed = (weights @ v).transpose(1, 2).reshape(b, s, d)
        x_BSD = x_BSD + self.dropout(self.out(mixed))
        return x_BSD + self.dropout(self.down(functional.gelu(self.up(self.norm2(x_BSD)))))


class Gpt(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.places = nn.Embedding(LENGTH, shape.hidden)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        order = torch.arange(LENGTH, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.places(order))
        future = order[:, None] < order[None, :]
        for block in self.blocks:
            x = block(x, future)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return {"loss": functional.cross_entropy(logits.float(), targets.flatten())}


def batch_of(seed: int, rows: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def job(shape: GptShape, name: str) -> Job:
    return Job(model=lambda: Gpt(shape).half(), batch=batch_of, name=f"GPT {name}")


def gpt_1_3b() -> Job:
    return job(SHAPES["1.3B"], "1.3B")


def gpt_2_2b() -> Job:
    return job(SHAPES["2.2B"], "2.2B")


def gpt_3_8b() -> Job:
    return job(SHAPES["3.8B"], "3.8B")
