"""Learning rates of an optimizer that holds several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .runtime.optimizer_bytes import optimizers_of


class RateSchedulers:
    """One scheduler for each optimizer, stepped together."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = schedulers

    def step(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler, own in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)


def make_scheduler(
    make: Callable[[Optimizer], LRScheduler] | None, optimizer: Optimizer | None
) -> LRScheduler | RateSchedulers | None:
    """The scheduler of an optimizer. One that is no `torch.optim.Optimizer` itself gets one for each that it
    holds, as PyTorch's schedulers take no other."""
    if make is None or optimizer is None:
        return None
    if isinstance(optimizer, Optimizer):
        return make(optimizer)
    return RateSchedulers([make(each) for each in optimizers_of(optimizer)])
