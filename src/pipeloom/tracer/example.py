"""A job from what a training script has: a model, one batch of its loader, its loss and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch

from ..ir.errors import BatchError, ConfigError, of_type
from ..ir.user_code import at, own_definition
from .job import Job
from .job_calls import JoinedBatches, common_rows
from .shared_memory import refuse_shared_memory

Batch: TypeAlias = Mapping[str, Any] | Iterable[Any] | Tensor
"""A dictionary (or `BatchEncoding`), a tuple or list, or one tensor, as a loader gives it."""


@dataclass(frozen=True)
class BatchForm:
    """How the batches of a loader are made: of named tensors (names is None), or of parts in a row.

    rows: of the example; None if there was none.
    """

    names: tuple[str, ...] | None = None
    rows: int | None = None

    def tensors(self, batch: Batch | None) -> dict[str, Tensor]:
        """A batch as named tensors; a list of batches as one. What is None in a dictionary is left out.

        Raises: BatchError if it is made otherwise, or of something that is no dense tensor with data, or
            requires a gradient.
        """
        if isinstance(batch, list) and batch and all(map(self._is_batch, batch)):
            return JoinedBatches.of([self.tensors(part) for part in batch])
        if batch is None or isinstance(batch, Mapping) != (self.names is None):
            expected = "a dictionary" if self.names is None else f"{len(self.names)} tensors in a row"
            raise BatchError(
                f"the batch is {of_type(batch)}, and should be {expected}",
                hint="give batches of one form, as the example that the pipeline was made with",
            )
        if isinstance(batch, Mapping):
            named = {str(name): value for name, value in batch.items() if value is not None}
        else:
            assert self.names is not None
            parts = (batch,) if isinstance(batch, Tensor) else tuple(batch)
            if len(parts) != len(self.names):
                raise BatchError(
                    f"the batch has {len(parts)} parts, the example had {len(self.names)}",
                    hint="give batches of one form",
                )
            named = dict(zip(self.names, parts, strict=True))
        for name, value in named.items():
            if not isinstance(value, Tensor):
                raise BatchError(
                    f"{name} of the batch is {of_type(value)}, no tensor",
                    hint="leave it out of what the loader collects, or make a tensor of it: nested batches "
                    "are to be flattened into one dictionary",
                )
            if value.requires_grad:
                raise BatchError(
                    f"{name} of the batch requires a gradient, which it would not get",
                    hint="detach it; what makes it and is to be trained belongs in the model",
                )
            if value.layout != torch.strided or value.is_meta:
                raise BatchError(
                    f"{name} of the batch is a tensor of {value.layout} on {value.device}",
                    hint="give dense tensors with data",
                )
        return named

    def _is_batch(self, part: Any) -> bool:
        if self.names is None:
            return isinstance(part, Mapping)
        return isinstance(part, list | tuple) or (len(self.names) == 1 and isinstance(part, Tensor))


@dataclass(frozen=True, kw_only=True)
class ExampleJob(Job):
    """Made of the arguments of a `Pipeline`."""

    given: nn.Module | None = None

    loss_setting = "Pipeline loss="


def given_to(job: Job) -> nn.Module | None:
    """The module that the job's model copies, if it does."""
    return job.given if isinstance(job, ExampleJob) else None


def job_of(
    model: nn.Module | Callable[[], nn.Module],
    example: Batch | None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Callable[..., Optimizer] | None = None,
    weight: Callable[[Mapping[str, Tensor]], float | Tensor] | None = None,
) -> tuple[Job, BatchForm]:
    """A job whose batches are made of the rows of one, and the form of its batches; see `Pipeline`.

    Raises: BatchError if the example is no batch; ConfigError if the model is none, or the loss takes more
        than such a batch has.
    """
    if not isinstance(example, Mapping | Tensor | Iterable) or isinstance(example, str):
        raise BatchError(
            f"the example is {of_type(example)}, no batch",
            hint="give one batch of the loader, as next(iter(loader)): a dictionary of tensors, a tuple of "
            "them, or one tensor",
        )
    if loss is not None and not callable(loss):
        raise ConfigError(f"the loss is {of_type(loss)}", hint="give a function of outputs and targets")
    form, for_loss = BatchForm(), 0
    if not isinstance(example, Mapping):
        parts = 1 if isinstance(example, Tensor) else len(tuple(example))
        for_loss = 0 if loss is None else min(max(0, _positional(loss) - 1), parts - 1)
        targets = ["target"] if for_loss == 1 else [f"target_{number}" for number in range(for_loss)]
        form = BatchForm((*map(str, range(parts - for_loss)), *targets))
    tensors = form.tensors(example)
    of_example = common_rows(tensors)
    if loss is not None and form.names is not None:
        _refuse_loss(loss, len(form.names), for_loss)

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        """Rows of the example, over and over."""
        chosen = (torch.arange(rows) + seed * rows) % of_example
        return {name: tensor[chosen] for name, tensor in tensors.items()}

    whole = loss
    if loss is not None and form.names is not None:

        def whole(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
            return loss(outputs, *[tensor for name, tensor in batch.items() if name.startswith("target")])

    job = ExampleJob(
        model=_maker(model),
        batch=batch,
        loss=whole,
        weight=weight,
        optimizer=optimizer,
        given=model if isinstance(model, nn.Module) else None,
        name=type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model"),
    )
    return job, replace(form, rows=of_example)


def _positional(function: Callable[..., Any]) -> int:
    """Arguments without a default that are given by position; 2, outputs and target, of a builtin."""
    called = function.forward if isinstance(function, nn.Module) else function
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    try:
        arguments = signature(called).parameters.values()
    except ValueError:
        return 2
    return sum(a.kind in kinds and a.default is Parameter.empty for a in arguments)


def _refuse_loss(loss: Callable[..., Any], parts: int, for_loss: int) -> None:
    """Raises: ConfigError if a loss does not take the output and the last parts of a batch."""
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature(called).bind(None, *range(for_loss))
    except ValueError:  # of a builtin
        return
    except TypeError as error:
        last = "the last part" if for_loss == 1 else f"the last {for_loss} parts"
        gets = f"the output and {last} of a batch of {parts}" if for_loss else "only the output"
        why = ", because the batch is one tensor" if parts == 1 else ""
        raise ConfigError(
            f"the loss cannot be called{at(own_definition(called))}: {error}; it gets {gets}{why}",
            hint="give batches as (inputs, targets), or as a dictionary, of which the loss gets all",
        ) from None


def _maker(model: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ConfigError(
                f"the model is {of_type(model)}",
                hint="give an nn.Module, or a function that makes one, as lambda: Net(config)",
            )
        return model
    refuse_shared_memory(model)  # a copy of it may have each its own

    def copied() -> nn.Module:
        """The module is real, whatever its copy is made for."""
        try:
            with no_dispatch(), torch.utils._python_dispatch._disable_current_modes():
                return copy.deepcopy(model)
        except RuntimeError as error:  # weight_norm of old keeps what it has computed, which has a history
            raise ConfigError(
                f"{type(model).__name__} cannot be copied: {error}",
                hint="give a function that makes it, as lambda: Net(config)",
            ) from error

    return copied


def weights_digest(module: nn.Module) -> list[complex]:
    """Tells initial weights apart: of each parameter the sum of its first entries."""
    first = [p.detach().flatten()[:64].to(torch.complex128) for p in module.parameters()]
    return [complex(entries.sum()) for entries in first]
