"""The loop of plain_script.py on two workers of Ray: python examples/ray_train.py

It needs Ray ("ray[train]"). Each worker is a rank, whose pipeline uses the process group that Ray has made.
With `python examples/ray_train.py --plain` it trains in one process, and its losses are the same.
"""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import pipeloom

SIZES = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 256}


def start():
    """Counting upwards in steps of 3 from random starts; the same data and model on every worker."""
    torch.manual_seed(0)
    ids = (torch.randint(256, (640, 1)) + 3 * torch.arange(64)) % 256
    config = GPT2Config(**SIZES, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(1)
    loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=32)
    return loader, GPT2LMHeadModel(config)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def train_worker():
    loader, model = start()
    pipe = pipeloom.Pipeline(model, example=next(iter(loader)), optimizer=optimizer, microbatches=8)
    for batch in loader:
        loss = pipe.step(batch)
        if pipe.rank == 0:
            print(f"loss {loss:.4f}")  # which Ray shows here
    ray.train.report({"loss": loss})
    pipe.close()


def train_plain():
    loader, model = start()
    stepper = optimizer(model.parameters())
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        print(f"loss {loss:.4f}")


if "--plain" in sys.argv:
    train_plain()
else:
    import ray.train
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2)
    TorchTrainer(train_worker, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit()
