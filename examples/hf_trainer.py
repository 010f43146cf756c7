"""A Hugging Face training script in a pipeline: its import is changed, and it is started by torchrun.

torchrun --nproc-per-node 2 examples/hf_trainer.py

With `python examples/hf_trainer.py --plain` the same script trains in one process, with the same numbers.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

if "--plain" not in sys.argv:
    from pipeloom.integrations.transformers import PipelineTrainer as Trainer

set_seed(0)
SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 256}
model = GPT2LMHeadModel(GPT2Config(**SIZES, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
ids = (torch.randint(256, (64, 1)) + 3 * torch.arange(32)) % 256  # counting upwards in steps of 3
rows = [{"input_ids": row, "labels": row} for row in ids]

arguments = TrainingArguments(
    output_dir="runs/hf_trainer",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,  # these are the micro-batches of the pipeline
    num_train_epochs=3,
    learning_rate=1e-3,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows[:48], eval_dataset=rows[48:])
trainer.train()
if trainer.is_world_process_zero():
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    print("eval losses", *[f"{loss:.5f}" for loss in losses])
