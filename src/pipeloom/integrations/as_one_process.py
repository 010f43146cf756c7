"""What a trainer made for one process wants of a pipeline: optimizer states, random numbers, even batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..pipeline import Pipeline


def optimizer_states(pipe: Pipeline) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter of the whole model, on the CPU. Every rank calls it."""
    mine = {
        name: {key: _on_cpu(value) for key, value in optimizer.state[param].items()}
        for optimizer in pipe.weights.optimizers
        for name, param in pipe.weights.params.items()
        if param in optimizer.state
    }
    merged: dict[str, dict[str, Any]] = {}
    for theirs in pipe.channel.all_gather_object(mine):
        merged = {**theirs, **merged}
    return merged


def load_optimizer_states(pipe: Pipeline, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Take those of this rank's parameters."""
    for name, param in pipe.weights.params.items():
        if param.requires_grad and name in states:
            pipe.weights.optimizers[0].state[param] = {
                key: value.to(param.device) if isinstance(value, Tensor) and value.ndim else value
                for key, value in states[name].items()
            }


def repeated(tensor: Tensor, rows: int, parts: int) -> Tensor:
    """A batch over and over until it can be split evenly: means over its rows stay."""
    return torch.cat([tensor] * (parts // gcd(rows, parts)))


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


@contextmanager
def random_kept() -> Iterator[None]:
    """What is looked at beforehand draws no numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
