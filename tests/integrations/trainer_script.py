"""Three of the recipes that transformers' users start from, on small made data, by one kind of Trainer.

torchrun --nproc-per-node N trainer_script.py FOLDER [resume] [lora]; without torchrun it is the plain
Trainer. With `lora` it is adapters of a model from a folder instead.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments, set_seed

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def language_modelling() -> dict[str, Any]:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    config = transformers.GPT2Config(**sizes, **NO_DROPOUT, use_cache=False, bos_token_id=0, eos_token_id=0)
    ids = (torch.randint(64, (24, 1)) + 3 * torch.arange(16)) % 64
    labels = ids.clone()
    labels[::3, :9] = -100  # micro-batches have different numbers of tokens
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    model = transformers.GPT2LMHeadModel(config)
    return {"model": model, "rows": rows, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.0}


def sequence_classification() -> dict[str, Any]:
    config = transformers.BertConfig(vocab_size=64, **SMALL, **QUIET, num_labels=3)
    ids = torch.randint(64, (24, 12))
    mask = (torch.arange(12) < torch.randint(6, 12, (24, 1))).long()
    rows = [
        {"input_ids": i, "attention_mask": m, "labels": int(i[0]) % 3} for i, m in zip(ids, mask, strict=True)
    ]
    model = transformers.BertForSequenceClassification(config)
    return {
        **{"model": model, "rows": rows, "compute_metrics": accuracy, "max_grad_norm": 0.0},
        "gradient_accumulation_steps": 2,  # BERT ignores how many labels it is told that there are
    }


def image_classification() -> dict[str, Any]:
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SMALL, **QUIET, num_labels=4)
    images = torch.randn(24, 3, 16, 16)
    rows = [{"pixel_values": image, "labels": number % 4} for number, image in enumerate(images)]
    model = transformers.ViTForImageClassification(config)
    return {"model": model, "rows": rows, "compute_metrics": accuracy, "optim": "sgd"}


@cache
def pretrained() -> tempfile.TemporaryDirectory[str]:
    """Made before the ranks know of each other: from then on `save_pretrained` writes on rank 0 alone."""
    folder = tempfile.TemporaryDirectory()
    language_modelling()["model"].save_pretrained(folder.name, max_shard_size="40KB")
    assert len(list(Path(folder.name).glob("*.safetensors"))) > 1
    return folder


def lora() -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    base = transformers.AutoModelForCausalLM.from_pretrained(pretrained().name)
    config = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, lora_dropout=0.0)
    return {**language_modelling(), "model": get_peft_model(base, config)}


def smoothed_lora() -> dict[str, Any]:
    return lora() | {"label_smoothing_factor": 0.1}


RECIPES = (language_modelling, sequence_classification, image_classification)


def main(folder_of_all: Path, recipes: Sequence[Callable[[], dict[str, Any]]], *, resumes: bool) -> None:
    for make in recipes:
        if "RANK" in os.environ:
            from pipeloom.integrations.transformers import PipelineTrainer as Trainer
        else:
            from transformers import Trainer
        set_seed(1)
        recipe = make()
        model, rows, metrics = recipe.pop("model"), recipe.pop("rows"), recipe.pop("compute_metrics", None)
        folder = folder_of_all / make.__name__
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=6,
            num_train_epochs=2,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            weight_decay=0.1,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **recipe,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows[:16],
            eval_dataset=rows[16:],
            compute_metrics=metrics,
        )
        resumed = str(next(iter(sorted(folder.glob("checkpoint-*"))))) if resumes else None
        trainer.train(resume_from_checkpoint=resumed)
        trainer.save_model(str(folder / "final"))
        if int(os.environ.get("RANK", "0")) == 0:
            (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    recipes = (lora, smoothed_lora) if "lora" in sys.argv else RECIPES
    main(Path(sys.argv[1]), recipes, resumes="resume" in sys.argv)
