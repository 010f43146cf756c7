"""The learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .config import Config


def rate_share(config: Config, step: int) -> float:
    """Learning rate of a step (0-based) as a share of the highest: linear warm-up, then half a cosine.

    Source: cosine decay of Loshchilov and Hutter, arXiv 1608.03983, without restarts.

    >>> from .config import OptimizerConfig
    >>> config = Config(steps=14, optimizer=OptimizerConfig(warmup_steps=4, final_rate_share=0.1))
    >>> [round(rate_share(config, step), 3) for step in (0, 3, 4, 9, 13)]
    [0.25, 1.0, 1.0, 0.55, 0.122]
    """
    settings = config.optimizer
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    length = max(config.steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / length, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.final_rate_share + (1 - settings.final_rate_share) * cosine


def scheduler_of(config: Config) -> Callable[[Optimizer], LambdaLR]:
    """Optimizer -> scheduler, stepped once per training step."""
    return lambda optimizer: LambdaLR(optimizer, lambda step: rate_share(config, step))
