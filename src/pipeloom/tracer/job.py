"""Job: everything pipeloom needs to know about what the user trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """An unmodified model, batches for it, and how it is trained.

    model: makes the `nn.Module`. Called under a fake-tensor mode when it is captured, and again on each
        rank, so it must not depend on global state and must give the same structure each time.
    batch: (seed, micro-batch size) -> keyword arguments of the model's forward, tensors with the
        micro-batch as their first dimension.
    loss: (outputs, batch) -> scalar tensor. By default the model's own output `.loss` (or `["loss"]`).
    weight: batch -> the number of tokens that the loss averages over, a number or a scalar tensor. With it,
        the loss of a step is the average over all tokens of all micro-batches; without it each micro-batch's
        loss counts by its number of rows.
    optimizer: parameters -> torch optimizer, or an object whose `step` runs several that it holds in its
        attributes. Each rank calls it with all parameters that are trained, in the model's order; those of
        other ranks have no data (they are on the meta device). By default AdamW(lr=1e-3).
    name: what messages, graphs and reports call the model.
    modules: lists of module names (FQNs), one list per stage: cut there instead of capturing single ops. It
        is also how a model that cannot be captured otherwise is cut at places of your choice.

    >>> import pipeloom, torch
    >>> def batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
    ...     return {"input": torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))}
    >>> job = pipeloom.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    ...     batch=batch,
    ...     loss=lambda output, batch: output.square().mean(),
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ... )
    >>> example = job.batch(0, 4)
    >>> example["input"].shape, job.loss(job.model()(**example), example).shape
    (torch.Size([4, 8]), torch.Size([]))
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None
    weight: Callable[[Mapping[str, Tensor]], float | Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    name: str = "model"
    modules: Sequence[Sequence[str]] | None = None
