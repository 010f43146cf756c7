"""Hugging Face's GPT-2, small and with random weights, trained in a pipeline:

torchrun --nproc-per-node 2 examples/hf_gpt2.py
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pipeloom


def model() -> torch.nn.Module:
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None))


def batch(seed: int, size: int) -> dict[str, torch.Tensor]:
    """Counting upwards in steps of 3 from random starts: something to learn."""
    starts = torch.randint(256, (size, 1), generator=torch.Generator().manual_seed(seed))
    ids = (starts + 3 * torch.arange(64)) % 256
    return {"input_ids": ids, "labels": ids}


def job() -> pipeloom.Job:
    return pipeloom.Job(name="gpt2", model=model, batch=batch)


if __name__ == "__main__":
    stages = int(os.environ["WORLD_SIZE"])  # one per process
    # From a cluster's figures every rank makes the same plan; measured times would differ.
    cluster = f"{stages} x cpu"
    plan = pipeloom.plan(job(), ranks=stages, microbatches=8, microbatch_size=4, cluster=cluster)
    with pipeloom.Pipeline(job(), plan) as pipeline:
        for step in range(30):
            loss = pipeline.step(batch(step, 32))
            if pipeline.rank == 0 and step % 5 == 4:
                print(f"step {step + 1}: loss {loss:.3f}")
