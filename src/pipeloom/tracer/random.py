"""Random numbers that do not depend on the cut.

Each random call is preceded by a seed made from the micro-batch's seed and the call's name in the captured
graph. Whatever stage, rank or order it runs in, it draws the same numbers; so does a run in one process.
"""

from __future__ import annotations

import zlib

import torch


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of one micro-batch of one step.

    >>> microbatch_seed(0, 3, 1) != microbatch_seed(0, 1, 3)
    True
    """
    return zlib.crc32(f"{seed}/{step}/{microbatch}".encode())


def seed_random(seed: int, call: str) -> None:
    """Seed the default generators for one random call."""
    torch.manual_seed(zlib.crc32(call.encode(), seed))
