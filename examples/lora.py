"""LoRA on a pretrained model in several ranks: torchrun --nproc-per-node 2 examples/lora.py

It needs peft. A folder of safetensors is read, adapters are trained and merged, and the model that is written
is read by plain transformers. `python examples/lora.py --plain` does it in one process, with the same losses.
"""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pipeloom

WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256, "max_position_embeddings": 64}
COUNTS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
MERGED = "runs/lora/merged"

# Stands in for a model that you have on disk: several shards and their index. Every process writes its own.
folder = tempfile.TemporaryDirectory()
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**WIDTHS, **COUNTS, use_cache=False)).save_pretrained(
    folder.name, max_shard_size="500KB"
)

# Counting upwards in steps of 3 from random starts: something to learn.
ids = (torch.randint(256, (320, 1)) + 3 * torch.arange(32)) % 256
loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=32)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder.name), LORA)


def optimizer(parameters):
    """Gets the adapters alone: what is frozen has no state."""
    return torch.optim.AdamW(parameters, lr=2e-2, weight_decay=0.0)


if "--plain" in sys.argv:
    main_process = True
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        print(f"loss {loss:.4f}")
else:
    with pipeloom.Pipeline(model, example=next(iter(loader)), optimizer=optimizer, microbatches=4) as pipe:
        main_process = pipe.rank == 0
        for batch in loader:
            loss = pipe.step(batch)
            if main_process:
                print(f"loss {loss:.4f}")
        model.load_state_dict(pipe.state_dict())

if main_process:
    model.merge_and_unload().save_pretrained(MERGED)
    merged = AutoModelForCausalLM.from_pretrained(MERGED)
    with torch.no_grad():
        print(f"loss {merged(**batch).loss:.4f} of the last batch, by the merged model from {MERGED}")
