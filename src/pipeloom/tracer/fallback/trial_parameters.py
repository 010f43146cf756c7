"""Real parameters and buffers for a trial run, a few modules at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .skeleton import Skeleton

LIMIT_BYTES = 2**30
"""Bytes made in one go; making more at once is faster, as each go runs through the whole constructor."""


class Materials:
    """Gives what a model initialises itself with, by name; fake tensors where `fake`.

    device: where they are to be.
    """

    def __init__(self, skeleton: Skeleton, device: torch.device, *, fake: bool = False) -> None:
        self.skeleton = skeleton
        self.device = device
        self.fake = fake
        self._order = list(skeleton.names)
        self._made: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors for one call: parameters are leaves, buffers may be changed."""
        names = list(names)
        if self.fake:
            return {name: self.skeleton.resting(name) for name in names}
        if any(name not in self._made for name in names):
            self._made = self._make(names)
        return {name: self._leaf(name, self._made[name]) for name in names}

    def kept(self, name: str) -> Tensor:
        """The same tensor every time."""
        if name not in self._kept:
            self._kept[name] = self.state([name])[name]
        return self._kept[name]

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.skeleton.params:
            return nn.Parameter(tensor, self.skeleton.resting(name).requires_grad)
        return tensor.clone()

    def _make(self, names: list[str]) -> dict[str, Tensor]:
        """What is asked for, and what is registered next, as far as the limit goes."""
        size, wanted = 0, list(names)
        last = max(self._order.index(name) for name in names)
        following = [n for n in self._order[last + 1 :] if n not in wanted]
        if self.skeleton.made.why_whole:
            following = [n for n in self._order if n not in wanted]
        for name in following:
            size += self.skeleton.resting(name).nbytes
            if size > LIMIT_BYTES and not self.skeleton.made.why_whole:
                break
            wanted.append(name)
        return make(self.skeleton, wanted, self.device, seed=0)


def make(skeleton: Skeleton, names: Iterable[str], device: torch.device, *, seed: int) -> dict[str, Tensor]:
    """Parameters, buffers and attributes as the model initialises them."""
    names = list(names)
    constants: Mapping[str, Tensor] = skeleton.constants
    made = skeleton.made.materialise(seed, [name for name in names if name not in constants])
    made |= {name: constants[name] for name in names if name in constants}
    return {name: tensor.to(device) for name, tensor in made.items()}
