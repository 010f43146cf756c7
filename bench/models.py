"""BERT, GPT-2, T5 and AmoebaNet-D with random weights, at published sizes and at sizes for two cores.

The language models are Hugging Face's, with dropout off and its own attention: one fused kernel for BERT and
GPT-2, single ops for T5, whose scores have a bias. Published sizes: BERT-large (Devlin et al. 2018, arXiv
1810.04805), GPT-2 with 1.5 billion parameters (Radford et al. 2019), T5-3B (Raffel et al. 2019, arXiv
1910.10683), AmoebaNet-D (18, 256) (Huang et al. 2018, arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import amoebanet
import torch
import transformers as hf
from torch import Tensor, nn

from pipeloom import Job

Make = Callable[[int], Job]
"""Length of a sequence, pixels along an image for AmoebaNet-D -> job."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model at one size. length: see `Make`."""

    name: str
    length: int
    make: Make

    @property
    def job(self) -> Job:
        return replace(self.make(self.length), name=self.name)


def text(length: int, vocabulary: int) -> Callable[[int, int], dict[str, Tensor]]:
    """Batches of random tokens, all of them targets."""

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (rows, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def language_model(kind: type[nn.Module], config: Any) -> Make:
    """A job of random tokens for one of Hugging Face's models."""
    return lambda length: Job(model=lambda: kind(config), batch=text(length, config.vocab_size))


def bert(*, layers: int, width: int, vocabulary: int = 30522) -> Make:
    return language_model(
        hf.BertForMaskedLM,
        hf.BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
    )


def gpt2(*, layers: int, width: int, vocabulary: int = 50257) -> Make:
    return language_model(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=vocabulary,
            n_embd=width,
            n_layer=layers,
            n_head=width // 64,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLMLoss",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
    )


def t5(*, layers: int, width: int, inner: int, heads: int, head: int, vocabulary: int = 32128) -> Make:
    """layers: of the encoder, and of the decoder.  inner, head: width of a feed-forward, and of a head."""
    return language_model(
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_kv=head,
            d_ff=inner,
            num_layers=layers,
            num_heads=heads,
            dropout_rate=0.0,
            use_cache=False,
            tie_word_embeddings=False,
            decoder_start_token_id=0,
        ),
    )


def amoeba(layers: int, filters: int, classes: int = 1000) -> Make:
    return lambda pixels: amoebanet.job(layers, filters, pixels=pixels, classes=classes)


REAL: Mapping[str, Size] = {
    "bert": Size(name="BERT-large", length=512, make=bert(layers=24, width=1024)),
    "gpt2": Size(name="GPT-2 1.5B", length=1024, make=gpt2(layers=48, width=1600)),
    "t5": Size(name="T5-3B", length=512, make=t5(layers=24, width=1024, inner=16384, heads=32, head=128)),
    "amoebanet": Size(name="AmoebaNet-D (18, 256)", length=224, make=amoeba(18, 256)),
}
SMALL: Mapping[str, Size] = {
    "bert": Size(name="small BERT", length=64, make=bert(layers=4, width=128, vocabulary=512)),
    "gpt2": Size(name="small GPT-2", length=64, make=gpt2(layers=4, width=128, vocabulary=512)),
    "t5": Size(
        name="small T5",
        length=48,
        make=t5(layers=2, width=128, inner=256, heads=2, head=64, vocabulary=512),
    ),
    "amoebanet": Size(name="AmoebaNet-D (3, 32)", length=64, make=amoeba(3, 32, classes=10)),
}
"""Models of a few million parameters, which two cores train in seconds."""
