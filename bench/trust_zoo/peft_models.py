"""GPT-2 with adapters of peft: the base is frozen, some parameters are replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import transformers as hf
from torch import nn

from pipeloom import Job

from . import WORDS, job, tokens


def _adapted(config: Callable[[], Any]) -> nn.Module:
    base = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=WORDS,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return peft.get_peft_model(base, config())


def _model(config: Callable[[], Any], name: str) -> Callable[[], Job]:
    return partial(job, partial(_adapted, config), tokens(), name=name)


_LORA = {"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["c_attn"], "init_lora_weights": False}

MODELS: dict[str, Callable[[], Job]] = {
    "LoRA": _model(lambda: peft.LoraConfig(**_LORA), "lora"),
    "DoRA": _model(lambda: peft.LoraConfig(**_LORA, use_dora=True), "dora"),
    "LoRA, rank-stabilised": _model(lambda: peft.LoraConfig(**_LORA, use_rslora=True), "rslora"),
    "IA3": _model(
        lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[]),
        "ia3",
    ),
    "VeRA": _model(lambda: peft.VeraConfig(r=2, task_type="CAUSAL_LM", target_modules=["c_attn"]), "vera"),
    "layer norm tuning": _model(
        lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["ln_1"]), "ln"
    ),
    "prompt tuning": _model(
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "prompt"
    ),
    "prefix tuning": _model(
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "prefix"
    ),
}
