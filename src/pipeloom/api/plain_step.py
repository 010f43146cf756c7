"""Plain PyTorch: the user's own module in one process, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..tracer.draws import DrawReplay
from ..tracer.job import Job
from ..tracer.job_calls import scalar_loss

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Differences by rounding alone, relative to a tensor's largest entry: sums in another order, several ops
deep. About 80 times the spacing of float32 and 8 times that of the short types."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainStep:
    """Micro-batches in plain PyTorch; no update.

    losses: of each micro-batch, times its share.  gradients: sums, as autograd has added them up.
    initial: parameters, copied before a forward could change them.  buffers: afterwards.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def plain_step(
    job: Job,
    parts: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    *,
    seed: int,
    autocast: torch.dtype | None = None,
    draws: list[tuple[str, Tensor]] | None = None,
) -> PlainStep:
    """Build the model with this seed, and run forward and backward of each part.

    draws: random numbers to draw, see `tracer.draws`.
    Raises: OtherDraws if it draws others.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # whatever the caller has switched off
        torch.manual_seed(seed)
        model = job.model()
        named: dict[str, nn.Parameter] = dict(model.named_parameters())
        initial = copies(named)
        losses = []
        replay = DrawReplay(draws) if draws is not None else None
        with replay or nullcontext():
            for part, share in zip(parts, shares, strict=True):
                with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = scalar_loss(job, model(**part), part) * share
                losses.append(float(loss.detach()))
                torch.autograd.backward(loss)
        if replay is not None:
            replay.require_all()
    held = dict(model.named_buffers()) | {n: p for n, p in named.items() if not p.requires_grad}
    return PlainStep(  # nobody has the module from now on, so nothing of it is copied
        losses=tuple(losses),
        gradients={name: param.grad for name, param in named.items() if param.grad is not None},
        initial=initial,
        buffers={name: tensor.detach() for name, tensor in held.items()},
    )


def rounding(tensors: Mapping[str, Tensor], autocast: torch.dtype | None = None) -> float:
    """Relative differences that the coarsest of these tensors' types explains.

    >>> rounding({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.bfloat16)})
    0.06
    """
    kinds = {t.dtype for t in tensors.values()} | {autocast}
    return max((size for dtype, size in ROUNDING.items() if dtype in kinds), default=ROUNDING[torch.float32])


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies without graph."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
