"""A Llama of 70B parameters; for `pipeloom plan bench/llama_70b.py:job` as well."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor

from pipeloom import Job


def job(*, layers: int = 80, length: int = 2048) -> Job:
    config = hf.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )

    def batch(seed: int, size: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 1000, (size, length), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    return Job(model=lambda: hf.LlamaForCausalLM(config), batch=batch, name="llama-70b")
