"""A byte-level GPT in plain PyTorch: it knows nothing of pipelines.

Shape suffixes: B sequences, T bytes, D width, H heads, K head width, V vocabulary (256 bytes).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Output(NamedTuple):
    """loss: mean cross-entropy in nats per byte.  logits: [B, T, V]."""

    loss: Tensor
    logits: Tensor


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        qkv = self.qkv(x_BTD).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK, v_BHTK = qkv.unbind(0)
        mixed_BHTK = functional.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        out_BTD: Tensor = self.project(mixed_BHTK.transpose(1, 2).reshape(b, t, d))
        return out_BTD


class Block(nn.Module):
    """Pre-norm: each half adds its change of the normalised input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.attention_norm(x_BTD)))
        x_BTD = x_BTD + self.drop(self.mlp(self.mlp_norm(x_BTD)))
        return x_BTD


class GPT(nn.Module):
    """Predicts each next byte from the ones before it.

    context: longest sequence.  tied: the head uses the embedding's matrix.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.0, tied: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Each block adds twice to the stream: keep its variance independent of depth (GPT-2, section 2.3).
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """input_ids, labels: int64 [B, T]; labels[b, t] is the byte after input_ids[b, t]."""
        positions_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BTD = self.drop(self.embed(input_ids) + self.position(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())
        return Output(loss, logits_BTV)
