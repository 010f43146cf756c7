"""A Transformer layer, and the transformer of the speed comparison: 8 blocks, width 256, sequence 128."""

from __future__ import annotations

from machine import next_tokens
from torch import Tensor, nn
from torch.nn import functional

from pipeloom import Job

BLOCKS, WIDTH, HEADS, SEQUENCE, VOCABULARY, MICROBATCH = 8, 256, 4, 128, 2000, 4


class Layer(nn.Module):
    """A Transformer layer: attention of several heads, then two linear layers. Shapes: B batch, S sequence, D
    width."""

    def __init__(
        self, width: int, heads: int, inner: int, *, causal: bool = False, norm: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width) if norm else nn.Identity()
        self.norm2 = nn.LayerNorm(width) if norm else nn.Identity()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        b, s, d = x_BSD.shape
        heads = self.qkv(self.norm1(x_BSD)).view(b, s, 3, self.heads, d // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        return x_BSD + self.down(functional.gelu(self.up(self.norm2(x_BSD))))


class Gpt(nn.Module):
    def __init__(
        self,
        blocks: int = BLOCKS,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        heads: int = HEADS,
        inner: int = 4 * WIDTH,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width, heads, inner, causal=True) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

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


batch_of = next_tokens(VOCABULARY, SEQUENCE)


def job() -> Job:
    return Job(model=Gpt, batch=batch_of, name="bench GPT")
