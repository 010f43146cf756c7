"""Random numbers that do not depend on the cut.

Each random call is preceded by a seed made from the micro-batch's seed and the call's name in the captured
graph. Whatever stage, rank or order it runs in, it draws the same numbers; so does a run in one process.
"""

from __future__ import annotations

import threading
import zlib

import torch
from torch import fx

_PROBABILITIES = ("dropout_p", "p")
"""Names of arguments that, being zero, keep a call from drawing random numbers."""


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of one micro-batch of one step.

    >>> microbatch_seed(0, 3, 1) != microbatch_seed(0, 1, 3)
    True
    """
    return zlib.crc32(f"{seed}/{step}/{microbatch}".encode())


_one_at_a_time = threading.Lock()
"""Ranks that are threads of one process share the default generators."""


def seed_random(seed: int, call: str) -> None:
    """Seed the default generators for one random call, and keep them until `end_random`."""
    _one_at_a_time.acquire()
    value = zlib.crc32(call.encode(), seed)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


def end_random() -> None:
    """The random call is done."""
    _one_at_a_time.release()


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers.

    Attention is tagged as random though it only is with dropout.
    """
    call = node.target
    if not isinstance(call, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in call.tags:
        return False
    for position, argument in enumerate(call._schema.arguments):
        if argument.name in _PROBABILITIES:
            given = node.kwargs.get(argument.name, argument.default_value)
            if position < len(node.args):
                given = node.args[position]
            return bool(given != 0.0)
    return True
