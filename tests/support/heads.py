"""Hugging Face language models with large vocabularies for their size, and the losses that people use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers as hf
import zoo
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job

WORDS = 203

_SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "use_cache": False,
    "attention_dropout": 0.0,
}


def _causal(config: type, **given: Any) -> Callable[[], nn.Module]:
    return lambda: hf.AutoModelForCausalLM.from_config(config(**given))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _causal(
        hf.GPT2Config,
        vocab_size=WORDS,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        use_cache=False,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    "llama": _causal(hf.LlamaConfig, **_SMALL),
    "gemma2": _causal(hf.Gemma2Config, **_SMALL, head_dim=8, final_logit_softcapping=3.0),
    "qwen2": _causal(hf.Qwen2Config, **_SMALL, tie_word_embeddings=True),
    "mistral": _causal(hf.MistralConfig, **_SMALL),
    "granite": _causal(hf.GraniteConfig, **_SMALL, logits_scaling=2.0),
    "phi": _causal(hf.PhiConfig, **_SMALL, embd_pdrop=0.0, resid_pdrop=0.0),
    "opt": _causal(hf.OPTConfig, **_SMALL, word_embed_proj_dim=16, ffn_dim=24, dropout=0.0),
    "gpt_neox": _causal(hf.GPTNeoXConfig, **_SMALL, hidden_dropout=0.0),
    "bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(**_SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ),
}
"""Tied: gpt2, gemma2, qwen2, opt, bert, t5. With a bias: phi, bert. Scaled: t5, granite. Capped:
gemma2."""


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    """Some labels count, others (-100) do not; padding, which has no gradient in some embeddings, is among
    the inputs."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, 10), generator=draw)
    counts = torch.rand(ids.shape, generator=draw) < 0.7
    return {"input_ids": ids, "labels": torch.where(counts, ids, -100)}


def smoothed(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Hugging Face's own losses are in float32 at most."""
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    return fn.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), label_smoothing=0.1)


def family(name: str, *, double: bool) -> Job:
    """In float32 with its own loss, in float64 with labels smoothed."""
    single = Job(model=FAMILIES[name], batch=batch, optimizer=zoo.sgd, name=name)
    return replace(zoo.in_double(single), loss=smoothed) if double else single


class Net(nn.Module):
    """A head whose loss is a function of logits and labels."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=3)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=bias)
        self.loss = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.middle(self.embed(input_ids)))), labels)


def _likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()


def _flat(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return fn.cross_entropy(logits.float().to(logits.dtype).view(-1, WORDS), labels.view(-1), **how)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smoothed": partial(_flat, label_smoothing=0.1),
    "summed": partial(_flat, reduction="sum"),
    "of-each": lambda logits, labels: _flat(logits, labels, reduction="none").square().mean(),
    "words-in-the-middle": lambda logits, labels: fn.cross_entropy(logits.transpose(1, 2), labels),
    "negative-likelihood": lambda logits, labels: fn.nll_loss(
        fn.log_softmax(logits, -1).flatten(0, 1), labels.flatten()
    ),
    "gathered": _likelihood,
    "z-loss": lambda logits, labels: _flat(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean(),
    "capped": lambda logits, labels: _flat(3 * torch.tanh(logits / 3), labels),
    "masked": lambda logits, labels: _flat(
        logits.masked_fill(torch.arange(WORDS) > WORDS // 2, float("-inf")), labels.clamp(max=WORDS // 2)
    ),
}


def with_loss(name: str) -> Job:
    return Job(
        model=lambda: Net(LOSSES[name], bias=len(name) % 2 == 0).double(),
        batch=batch,
        optimizer=zoo.sgd,
        name=name,
    )
