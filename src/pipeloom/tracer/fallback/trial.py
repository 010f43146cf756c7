"""Trial runs of modules on the weights that the model initialises itself with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...ir.errors import CutError
from ..attributes import attributes_kept
from ..stage.functions import DiscardSink, activation_bytes
from .module_functions import ModuleFunctions
from .skeleton import Skeleton


def initial_state(skeleton: Skeleton, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Parameters, buffers and tensor attributes by FQN, as the model initialises them with seed 0."""
    names = list(names)
    constants: Mapping[str, Tensor] = skeleton.constants
    state = skeleton.blueprint.materialise(0, [name for name in names if name not in constants])
    state |= {name: constants[name] for name in names if name in constants}
    return {name: tensor.to(device) for name, tensor in state.items()}


class TrialParameters:
    """Initial parameters and buffers for a run of the whole model, of which a few modules are in memory.

    device: where they are to be.  fake: hand out the fake tensors of the skeleton instead.
    limit_bytes: how much is made in one go. More at once is faster, as each go runs through the whole
        constructor.
    """

    def __init__(
        self, skeleton: Skeleton, device: torch.device, *, fake: bool = False, limit_bytes: int = 2**30
    ) -> None:
        self.skeleton = skeleton
        self.device = device
        self.fake = fake
        self.limit_bytes = limit_bytes
        self._order = list(skeleton.names)
        self._loaded: dict[str, Tensor] = {}
        self._pinned: dict[str, Tensor] = {}
        self._storages: dict[int, str] = {}

    @property
    def loaded_bytes(self) -> int:
        """Bytes of what was made in the last go."""
        return sum(tensor.nbytes for tensor in self._loaded.values())

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors for one call: parameters are leaves, buffers may be changed."""
        names = list(names)
        if self.fake:  # not those that rest: `module.to()` in a forward exchanges what is in a parameter
            return {name: self._leaf(name, self.skeleton.resting(name).detach()) for name in names}
        if any(name not in self._loaded for name in names):
            self._loaded = self._load(names)
            real = (self._loaded | self._pinned).items()
            self._storages = {t.untyped_storage()._cdata: n for n, t in real if n in self.skeleton.params}
        return {name: self._leaf(name, self._loaded[name]) for name in names}

    def storages(self) -> dict[int, str]:
        """Storages of the parameters that are in memory -> FQN."""
        if self.fake and not self._storages:
            self._storages = {
                self.skeleton.resting(n).untyped_storage()._cdata: n for n in self.skeleton.params
            }
        return self._storages

    def pinned(self, name: str) -> Tensor:
        """The same tensor every time."""
        if name not in self._pinned:
            self._pinned[name] = self.state([name])[name]
        return self._pinned[name]

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.skeleton.params:
            return nn.Parameter(tensor, self.skeleton.resting(name).requires_grad)
        return tensor.clone()

    def _load(self, names: list[str]) -> dict[str, Tensor]:
        """What is asked for, and what is registered next, as far as the limit goes."""
        size, chosen = 0, list(names)
        last = max(self._order.index(name) for name in names)
        following = [n for n in self._order[last + 1 :] if n not in chosen]
        builds_whole = bool(self.skeleton.blueprint.why_whole)
        if builds_whole:
            following = [n for n in self._order if n not in chosen]
        for name in following:
            size += self.skeleton.resting(name).nbytes
            if size > self.limit_bytes and not builds_whole:
                break
            chosen.append(name)
        return initial_state(self.skeleton, chosen, self.device)


def trial_run(functions: ModuleFunctions, batch: Mapping[str, Tensor], device: torch.device) -> None:
    """Run each function once on initial weights and fill in what memory it takes: `residual_bytes`,
    `carried_bytes` and `peak_bytes`.

    batch: a micro-batch, on any device.
    """
    state = initial_state(functions.skeleton, [*functions.params, *functions.buffers], device)
    inputs = {n: t.to(device) for n, t in batch.items()} | dict(functions.examples)
    with attributes_kept(functions.skeleton.model), torch.random.fork_rng(), torch.no_grad():
        for split in (False, True):
            outputs, residuals = functions.forward(state, inputs, 0)
            if not functions.differentiable:
                return
            functions.residual_bytes = {"autograd": activation_bytes(residuals)}
            grads = {n: torch.ones_like(t) for n, t in outputs.items() if not n.startswith("buffer:")}
            outputs.clear()
            if not split:
                functions.backward(state, residuals, grads, DiscardSink())
                continue
            try:
                _, carried = functions.backward_input(state, residuals, grads)
            except CutError:  # it is an error only if the schedule splits the backward
                return
            functions.carried_bytes = activation_bytes(carried)
            functions.backward_weight(state, carried, DiscardSink())
