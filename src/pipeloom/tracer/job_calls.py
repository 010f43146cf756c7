"""What pipeloom calls of a job: its batches, and its model, together with its loss or in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from inspect import Parameter, signature
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ir.errors import BatchError, CaptureError, ConfigError, of_type
from ..ir.user_code import at, call_own, own_definition, raised_at
from .given_model import LossError, given_watched
from .job import Job
from .random import one_thread_at_a_time


@one_thread_at_a_time
def sample_batch(job: Job, seed: int, rows: int) -> dict[str, Tensor]:
    """`job.batch(seed, rows)`, with the default generators left as they were.

    A job may seed them to make its batch; a rank that is a thread must not do so while another initialises
    its weights.

    Raises: ConfigError if it takes other arguments, or fails.
    """
    hint = "it gets a seed and a number of rows, and returns a dictionary of tensors"
    with torch.random.fork_rng(devices=[]):
        return call_own("Job.batch", job.batch, seed, rows, hint=hint)


def common_rows(batch: Mapping[str, Tensor]) -> int:
    """Raises: BatchError if there are no tensors, or one has no rows or others than the first."""
    if not batch:
        raise BatchError("the batch has no tensors", hint="give the forward's tensors, by their names")
    rows = {name: len(tensor) if tensor.ndim else 0 for name, tensor in batch.items()}
    first = next(iter(rows.values()))
    if not first or {*rows.values()} != {first}:
        told = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise BatchError(
            f"the batch's tensors should have the same number of rows, at least 1, and have: {told}",
            hint="the first dimension of every tensor is the batch: give what is one for all rows once per "
            "row, or make it a buffer of the model",
        )
    return first


class JoinedBatches(dict[str, Tensor]):
    """Several batches of one step as one, which is not to be split anywhere else than they were.

    rows: of each.
    """

    rows: tuple[int, ...]

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, Tensor]]) -> JoinedBatches:
        """Raises: BatchError if they differ in more than their rows, or one has other rows than it should."""
        try:
            joined = cls({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
        except (RuntimeError, TypeError, KeyError) as error:
            raise BatchError(
                f"the batches of one step cannot be joined: {error}",
                hint="let the collator pad them all to one length",
            ) from None
        joined.rows = tuple(map(common_rows, batches))
        return joined


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
def evaluation_mode(model: nn.Module, watched: AbstractContextManager[None] | None = None) -> Iterator[None]:
    """`model.eval()`; afterwards each module has the mode that it had. watched: around `model.eval()`."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with watched or nullcontext():
            model.eval()
        yield
    finally:
        if any(type(module).train is not nn.Module.train for module, _ in modes):
            model.train(modes[0][1])  # a user's own may set more than the mode
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
    if the job has a loss of its own; parts of a tuple, called "0", "1", ..., are passed by position.

    Raises: CaptureError if the forward does not take them.
    """
    parts = [tensor for name, tensor in batch.items() if name.isdigit()] if "0" in batch else []
    named = {} if parts else dict(batch)
    if named and job.loss is not None:
        arguments = signature(model.forward).parameters
        if all(argument.kind is not Parameter.VAR_KEYWORD for argument in arguments.values()):
            named = {name: tensor for name, tensor in batch.items() if name in arguments}
    try:
        return model(*parts, **named)
    except TypeError as error:
        if (refusal := _not_taken(job, model, batch, parts, named)) is None:
            raise
        raise refusal from error


def _not_taken(
    job: Job,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    parts: Sequence[Tensor],
    named: Mapping[str, Tensor],
) -> CaptureError | None:
    """Which entries of a batch a forward does not take; None if it takes them.

    parts, named: what it gets of them.
    """
    form = signature(model.forward)
    try:
        form.bind(*parts, **named)
    except TypeError as error:
        why = str(error)
    else:
        return None
    where = at(own_definition(type(model)))
    if (more := [name for name in named if name not in form.parameters]) and job.loss is None:
        names = " and ".join(map(repr, more))
        return CaptureError(
            f"the forward of {job.name} takes no {names}{where}",
            hint=f"give {job.loss_setting}, which gets {names}, or leave that out of the batch",
        )
    if parts:
        given, hint = f"{len(parts)} parts of a batch", f"give {job.loss_setting}, which gets the last parts"
        if job.loss is not None:
            hint = "the loss gets as many of the last parts as it has arguments beside the outputs"
    else:
        given = f"a batch of {' and '.join(map(repr, batch)) or 'no entries'}"
        hint = f"name entries of the batch as the forward's arguments: {', '.join(form.parameters)}"
    return CaptureError(f"the forward of {job.name} cannot take {given}: {why}{where}", hint=hint)


def named_outputs(outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors among a model's outputs that have a row for each of the batch, by their keys, numbers or
    attributes; one tensor alone is called "output". What is nested deeper, such as a cache, is left out."""
    if isinstance(outputs, Tensor):
        named: dict[str, Any] = {"output": outputs}
    elif isinstance(outputs, Mapping):
        named = dict(outputs)
    elif isinstance(outputs, Sequence):
        named = {str(number): value for number, value in enumerate(outputs)}
    else:
        named = dict(getattr(outputs, "__dict__", {}))
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
        with given_watched(job.name):
            loss: Any = job.loss(outputs, batch)
    else:
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        if loss is None and isinstance(outputs, Tensor) and outputs.ndim == 0:
            loss = outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        if loss is None and job.loss is None:
            raise CaptureError(
                f"the output of {job.name} has no .loss",
                hint=f"give {job.loss_setting}, a function of the outputs that returns a scalar tensor",
            )
        a_tensor = isinstance(loss, Tensor)
        got = f"shape {tuple(loss.shape)}" if a_tensor else of_type(loss)
        raise CaptureError(
            f"the loss of {job.name} must be a scalar tensor, got {got}",
            hint="return its mean" if a_tensor else "return a tensor of one number",
        )
    return loss.reshape(())


def refuse_state_of_loss(name: str, where: str) -> None:
    """Raises: LossError if the job's loss runs: it keeps something from one call to the next."""
    if any(frame.f_code is scalar_loss.__code__ for frame, _ in walk_stack(None)):
        raise LossError(
            f"the loss of {name} changes a tensor that it keeps for the next call{where}: each rank would "
            "have its own",
            hint="keep it in a buffer of the model; a model may compute its loss itself, and return it",
        )


def failed_call(job: Job, batch: Mapping[str, Tensor], error: Exception) -> CaptureError:
    """What failed when the job's model and loss were called: the loss, or the forward."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0] if lines else 'no message'}{at(raised_at(error))}"
    loss = scalar_loss.__code__
    if not any(frame.f_code is loss for frame, _ in walk_tb(error.__traceback__)):
        return CaptureError(
            f"the forward of {job.name} fails: {what}",
            hint="run one training step of the model in plain PyTorch on such a batch",
        )
    if "0" not in batch:
        gets, has = "(outputs, batch)", f"the batch has {', '.join(batch)}"
    else:
        gets = f"({', '.join(['outputs', *(name for name in batch if not name.isdigit())])})"
        has = "call it in plain PyTorch with the outputs of the model for such a batch"
    return LossError(f"the loss of {job.name} fails: {what}; it gets {gets}", hint=has)
