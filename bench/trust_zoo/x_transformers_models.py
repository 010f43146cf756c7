"""Models of x_transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as fn
from x_transformers import Decoder, Encoder, TransformerWrapper

from pipeloom import Job

from . import WORDS, job, tokens


class Language(nn.Module):
    """A wrapped transformer with a loss over next tokens."""

    def __init__(self, layers: Callable[..., nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.net = TransformerWrapper(
            num_tokens=WORDS,
            max_seq_len=16,
            attn_layers=layers(dim=16, depth=2, heads=2, attn_dim_head=8, **options),
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(input_ids)
        return {"loss": fn.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def _model(name: str, layers: Callable[..., nn.Module] = Decoder, **options: Any) -> Callable[[], Job]:
    return partial(job, partial(Language, layers, options), tokens(), name=name)


MODELS: dict[str, Callable[[], Job]] = {
    "decoder": _model("decoder"),
    "encoder": _model("encoder", Encoder),
    "rotary, RMSNorm, GLU": _model("rotary", rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True),
    "ALiBi": _model("alibi", alibi_pos_bias=True),
    "layer dropout": _model("layer_dropout", layer_dropout=1e-9),
}
