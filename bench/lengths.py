"""Seconds that batches of differing lengths lose to capturing: torchrun --nproc-per-node 2 bench/lengths.py

Batches of 12 sequence lengths between 32 and 512, in a random order anew in each epoch, on a small GPT-2. The
pipeline captures a length when it first comes. By epoch: its seconds, those of them in which a rank looked up
or captured its stages, and their share.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import pipeloom
from pipeloom.rank_stages import StageVariants

LENGTHS = (32, 48, 64, 96, 128, 160, 208, 256, 320, 384, 448, 512)
ROWS, MICROBATCHES, TIMES, EPOCHS = 8, 4, 2, 3
SIZES = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 512, "vocab_size": 4096}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
QUIET = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}


class Timed:
    """Seconds of a rank in `StageVariants.variant`, with the wait for the other ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        looked_up = StageVariants.variant

        def variant(variants: StageVariants, part: Mapping[str, Tensor]) -> object:
            start = time.perf_counter()
            try:
                return looked_up(variants, part)
            finally:
                self.seconds += time.perf_counter() - start

        StageVariants.variant = variant  # type: ignore[assignment, method-assign]


def batch(length: int) -> dict[str, Tensor]:
    ids = (torch.randint(4096, (ROWS, 1)) + 3 * torch.arange(length)) % 4096
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    order, capturing = random.Random(0), Timed()
    model = GPT2LMHeadModel(GPT2Config(**SIZES, **NO_DROPOUT, **QUIET))
    with pipeloom.Pipeline(model, example=batch(LENGTHS[-1]), microbatches=MICROBATCHES) as pipe:
        for epoch in range(EPOCHS):
            lengths = [*LENGTHS] * TIMES
            order.shuffle(lengths)
            capturing.seconds, start = 0.0, time.perf_counter()
            for length in lengths:
                pipe.step(batch(length))
            seconds = time.perf_counter() - start
            if pipe.rank == 0:
                share = capturing.seconds / seconds
                print(
                    f"epoch {epoch + 1}: {len(lengths)} steps in {seconds:.1f} s, "
                    f"{capturing.seconds:.3f} s of them capturing ({share:.2%})"
                )


if __name__ == "__main__":
    main()
