"""Models of transformers, each from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from pipeloom import Job

from . import CLASSES, WORDS, Batch, images, job, tokens

logging.getLogger("transformers").setLevel(logging.ERROR)

TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
NO_DROPOUT = {
    name: 0.0
    for name in (
        "dropout attention_dropout activation_dropout hidden_dropout_prob attention_probs_dropout_prob "
        "resid_pdrop embd_pdrop attn_pdrop hidden_dropout dropout_rate classifier_dropout "
        "embed_dropout attention_dropout_prob resid_dropout embedding_dropout drop_path_rate"
    ).split()
}
CACHES = {"use_cache": False}


def _made(kind: str, config: str, options: dict[str, Any]) -> nn.Module:
    settings = getattr(hf, config)
    known = {n: v for n, v in (NO_DROPOUT | CACHES).items() if hasattr(settings(), n)}
    return getattr(hf, kind)(settings(**(known | options)))


def _model(kind: str, config: str, batch: Callable[[int, int], Batch], **options: Any) -> Callable[[], Job]:
    """kind, config: names of the classes."""
    return partial(job, partial(_made, kind, config, options), batch, name=kind)


def _speech(seed: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "input_values": torch.randn(rows, 600, generator=made),
        "labels": torch.randint(0, CLASSES, (rows,), generator=made),
    }


def _spectrum(seed: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(rows, 8, 40, generator=made),
        "labels": torch.randint(3, WORDS, (rows, 6), generator=made),
    }


def _two_sided(seed: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(3, WORDS, (rows, 8), generator=made),
        "pixel_values": torch.randn(rows, 3, 16, 16, generator=made),
    }


class _ContrastiveClip(nn.Module):
    """CLIP with its own loss, which compares all rows of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        text = TEXT | {"max_position_embeddings": 16, "projection_dim": 8}
        vision = {n: v for n, v in TEXT.items() if n not in ("vocab_size",) and "token" not in n}
        vision |= {"image_size": 16, "patch_size": 8, "projection_dim": 8}
        self.clip = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.clip(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


_GPT = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_IMAGE = {n: v for n, v in TEXT.items() if "token" not in n and n != "vocab_size"} | {
    "image_size": 16,
    "patch_size": 4,
    "num_labels": CLASSES,
}
_PIXELS = images(16, name="pixel_values", label="labels")
_WAV2VEC2 = TEXT | {
    "num_labels": CLASSES,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "classifier_proj_size": 8,
    "layerdrop": 0.0,
}
_WHISPER = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16}

MODELS: dict[str, Callable[[], Job]] = {
    "GPT-2": _model("GPT2LMHeadModel", "GPT2Config", tokens(), **_GPT),
    "GPT-NeoX": _model("GPTNeoXForCausalLM", "GPTNeoXConfig", tokens(), **TEXT),
    "OPT": _model(
        "OPTForCausalLM", "OPTConfig", tokens(), **TEXT, ffn_dim=32, word_embed_proj_dim=16, layerdrop=0.0
    ),
    "OPT with LayerDrop": _model(
        "OPTForCausalLM", "OPTConfig", tokens(), **TEXT, ffn_dim=32, word_embed_proj_dim=16, layerdrop=1e-9
    ),
    "BLOOM": _model(
        "BloomForCausalLM", "BloomConfig", tokens(), vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2
    ),
    "Llama": _model("LlamaForCausalLM", "LlamaConfig", tokens(), **TEXT, num_key_value_heads=1),
    "Mistral": _model("MistralForCausalLM", "MistralConfig", tokens(), **TEXT, num_key_value_heads=1),
    "Qwen2": _model("Qwen2ForCausalLM", "Qwen2Config", tokens(), **TEXT, num_key_value_heads=1),
    "Gemma": _model("GemmaForCausalLM", "GemmaConfig", tokens(), **TEXT, num_key_value_heads=1, head_dim=8),
    "Phi": _model("PhiForCausalLM", "PhiConfig", tokens(), **TEXT),
    "Mixtral": _model(
        "MixtralForCausalLM", "MixtralConfig", tokens(), **TEXT, num_key_value_heads=1, num_local_experts=3
    ),
    "Mamba": _model(
        "MambaForCausalLM",
        "MambaConfig",
        tokens(),
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
    ),
    "BERT": _model("BertForMaskedLM", "BertConfig", tokens(attention_mask=8), **TEXT),
    "RoBERTa": _model("RobertaForMaskedLM", "RobertaConfig", tokens(), **TEXT, max_position_embeddings=32),
    "ALBERT": _model("AlbertForMaskedLM", "AlbertConfig", tokens(), **TEXT, embedding_size=8),
    "ELECTRA": _model("ElectraForMaskedLM", "ElectraConfig", tokens(), **TEXT, embedding_size=8),
    "DeBERTa-v2": _model("DebertaV2ForMaskedLM", "DebertaV2Config", tokens(), **TEXT),
    "XLNet": _model(
        "XLNetLMHeadModel",
        "XLNetConfig",
        tokens(),
        vocab_size=WORDS,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=32,
    ),
    "T5": _model(
        "T5ForConditionalGeneration",
        "T5Config",
        tokens(),
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "Switch Transformer": _model(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        tokens(),
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
        router_jitter_noise=0.0,
    ),
    "BART": _model("BartForConditionalGeneration", "BartConfig", tokens(), **SEQ2SEQ),
    "BART with LayerDrop": _model(
        "BartForConditionalGeneration",
        "BartConfig",
        tokens(),
        **SEQ2SEQ,
        encoder_layerdrop=1e-9,
        decoder_layerdrop=1e-9,
    ),
    "Whisper": _model("WhisperForConditionalGeneration", "WhisperConfig", _spectrum, **_WHISPER),
    "Wav2Vec2": _model(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _speech, **_WAV2VEC2, apply_spec_augment=False
    ),
    "Wav2Vec2 with SpecAugment": _model(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        _speech,
        **_WAV2VEC2,
        mask_time_prob=1e-9,
        mask_time_length=2,
        mask_time_min_masks=0,
    ),
    "ViT": _model("ViTForImageClassification", "ViTConfig", _PIXELS, **_IMAGE),
    "Swin": _model(
        "SwinForImageClassification",
        "SwinConfig",
        _PIXELS,
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=2,
        num_labels=CLASSES,
    ),
    "ConvNeXt": _model(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _PIXELS,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        num_labels=CLASSES,
    ),
    "CLIP": partial(job, _ContrastiveClip, _two_sided, name="CLIP"),
    "Reformer": _model(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        tokens(16),
        vocab_size=WORDS,
        hidden_size=16,
        feed_forward_size=32,
        attention_head_size=8,
        num_attention_heads=2,
        attn_layers=["local", "local"],
        axial_pos_embds=False,
        is_decoder=True,
        local_attn_chunk_length=4,
        max_position_embeddings=32,
        hash_seed=1,
        local_attention_probs_dropout_prob=0.0,
    ),
    "Longformer": _model("LongformerForMaskedLM", "LongformerConfig", tokens(), **TEXT, attention_window=4),
    "BigBird": _model(
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        tokens(32),
        **TEXT,
        block_size=2,
        num_random_blocks=1,
        max_position_embeddings=64,
    ),
    "FNet": _model(
        "FNetForMaskedLM",
        "FNetConfig",
        tokens(),
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=32,
    ),
}
