"""What pipeloom calls of a job: its batches, and its model, together with its loss or in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ir.errors import CaptureError, ConfigError
from .job import Job
from .random import one_thread_at_a_time


@one_thread_at_a_time
def sample_batch(job: Job, seed: int, rows: int) -> dict[str, Tensor]:
    """`job.batch(seed, rows)`, with the default generators left as they were.

    A job may seed them to make its batch; a rank that is a thread must not do so while another initialises
    its weights.
    """
    with torch.random.fork_rng(devices=[]):
        return job.batch(seed, rows)


def at_length(job: Job, length: int) -> Job:
    """The same job with batches of another sequence length. The length is the second dimension of the first
    tensor; each dimension but rows that is as long is cut, or goes on from its start.

    Raises: ConfigError, when a batch is made, if no tensor of the job's batches has two dimensions.
    """

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        tensors = job.batch(seed, rows)
        own = next((tensor.shape[1] for tensor in tensors.values() if tensor.ndim > 1), None)
        if own is None:
            raise ConfigError(
                f"lengths are given, and batches of {job.name} have no second dimension that is a length",
                hint="leave lengths out",
            )
        places = torch.arange(length) % own
        for name, tensor in tensors.items():
            for dim in range(1, tensor.ndim):
                if tensor.shape[dim] == own:
                    tensors[name] = tensors[name].index_select(dim, places.to(tensor.device))
        return tensors

    return replace(job, batch=batch)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()`; afterwards each module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class ModelWithLoss(nn.Module):
    """Model and loss as one module, so that both are in the graph.

    with_outputs: it also returns what the model does, see `named_outputs`.
    """

    def __init__(self, model: nn.Module, job: Job, *, with_outputs: bool = False) -> None:
        super().__init__()
        self.model = model
        self.job = job
        self.with_outputs = with_outputs

    def forward(self, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        outputs = call_model(self.job, self.model, batch)
        loss = scalar_loss(self.job, outputs, batch)
        return (loss, named_outputs(outputs, batch)) if self.with_outputs else loss


def call_model(job: Job, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """The outputs of a job's model for a batch. Entries that its forward has no argument for are the loss's,
    if the job has a loss of its own; parts of a tuple, called "0", "1", ..., are passed by position."""
    if "0" in batch:
        return model(*[tensor for name, tensor in batch.items() if name.isdigit()])
    if job.loss is None:
        return model(**batch)
    arguments = signature(model.forward).parameters
    if any(argument.kind is Parameter.VAR_KEYWORD for argument in arguments.values()):
        return model(**batch)
    return model(**{name: tensor for name, tensor in batch.items() if name in arguments})


def named_outputs(outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors among a model's outputs that have a row for each of the batch, by their keys or numbers;
    one tensor alone is called "output". What is nested deeper, such as a cache, is left out."""
    if isinstance(outputs, Tensor):
        named: dict[str, Any] = {"output": outputs}
    elif isinstance(outputs, Mapping):
        named = dict(outputs)
    else:
        named = {str(number): value for number, value in enumerate(outputs)}
    rows = len(next(iter(batch.values())))
    return {n: t for n, t in named.items() if isinstance(t, Tensor) and t.ndim and len(t) == rows}


def make_optimizer(make: Callable[..., Optimizer], params: Mapping[str, nn.Parameter]) -> Optimizer:
    """What a job's function makes of parameters: of pairs (name, parameter), if its first argument is called
    so, as `named_parameters`."""
    try:
        first = next(iter(signature(make).parameters), "")
    except (TypeError, ValueError):  # of a builtin
        first = ""
    return make(list(params.items()) if first.startswith("named") else list(params.values()))


def scalar_loss(job: Job, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a model's outputs: by the job's `loss`, or the outputs' own.

    Raises: CaptureError if there is none, or it is not a scalar.
    """
    if job.loss is not None:
        loss: Any = job.loss(outputs, batch)
    else:
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if loss is None and isinstance(outputs, Tensor) and outputs.ndim == 0:
            loss = outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError(
            f"the loss of {job.name} must be a scalar tensor, got {got}",
            hint="return outputs with a `.loss`, or give Job(loss=...) a function that returns a scalar",
        )
    return loss.reshape(())
