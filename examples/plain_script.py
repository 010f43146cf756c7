"""A training script of your own, on several ranks: torchrun --nproc-per-node 2 examples/plain_script.py

With one process, `python examples/plain_script.py --plain`, it is the loop that everybody writes, and its
losses are the same.
"""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import pipeloom

SIZES = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 256}
CONFIG = GPT2Config(**SIZES, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

# Counting upwards in steps of 3 from random starts: something to learn.
torch.manual_seed(0)
ids = (torch.randint(256, (640, 1)) + 3 * torch.arange(64)) % 256
loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=32)
torch.manual_seed(1)
model = GPT2LMHeadModel(CONFIG)


def optimizer(named_parameters):
    """Norms and biases are not decayed."""
    named = list(named_parameters)
    decayed = {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1}
    others = {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=1e-3)


if "--plain" in sys.argv:
    stepper = optimizer(model.named_parameters())
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        print(f"loss {loss:.4f}")
else:
    pipe = pipeloom.Pipeline(model, example=next(iter(loader)), optimizer=optimizer, microbatches=8)
    for batch in loader:
        loss = pipe.step(batch)
        if pipe.rank == 0:
            print(f"loss {loss:.4f}")
    pipe.close()
