"""The transformer of the speed comparison: 8 blocks, width 256, sequence 128, vocabulary 2000."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job

BLOCKS, WIDTH, HEADS, SEQUENCE, VOCABULARY, MICROBATCH = 8, 256, 4, 128, 2000, 4


class Block(nn.Module):
    """Pre-norm attention and MLP. Shapes: B batch, S sequence, D width, H heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSD: Tensor) -> Tensor:
        b, s, d = x_BSD.shape
        heads = self.qkv(self.norm1(x_BSD)).view(b, s, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        return x_BSD + self.down(functional.gelu(self.up(self.norm2(x_BSD))))


class Gpt(nn.Module):
    def __init__(self, blocks: int = BLOCKS, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.loss_of(self.head(x), targets)}

    @staticmethod
    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def half(self, index: int) -> nn.Sequential:
        """The first or second half as a chain, as a user of another framework would cut it by hand."""
        if index == 0:
            return nn.Sequential(self.embed, *self.blocks[: BLOCKS // 2])
        return nn.Sequential(*self.blocks[BLOCKS // 2 :], self.head)


def batch_of(seed: int, rows: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    text = torch.randint(vocabulary, (rows, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def job() -> Job:
    return Job(model=Gpt, batch=batch_of, name="bench GPT")
