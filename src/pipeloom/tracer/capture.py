"""nn.Module with a loss -> OpGraph, by torch.export.

The exported forward graph is made functional (no in-place calls; buffer updates are outputs) while
composite operations such as `linear` and `scaled_dot_product_attention` stay whole, so that each device
picks its own kernel. The model runs on fake tensors: its size does not matter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.errors import CaptureError
from .blueprint import Blueprint, blueprint
from .captured import Captured
from .export import export, from_program
from .fallback import ModuleCut, cut_modules
from .job import Job
from .loss import WithLoss
from .once import one_thread
from .random import python_random_kept, python_state
from .sample import sample_batch

_log = logging.getLogger("pipeloom")


@one_thread
def capture(
    job: Job,
    microbatch_size: int,
    *,
    batch: Mapping[str, Tensor] | None = None,
    autocast: torch.dtype | None = None,
    like: Captured | None = None,
) -> Captured:
    """Capture a job's model and loss for one micro-batch.

    batch: a micro-batch to take the shapes from; by default `job.batch(0, microbatch_size)`.
    autocast: dtype of mixed precision, or None.
    like: an earlier capture of the same job, for a batch of other shapes: the model is not built again.
    A model that cannot be exported is captured as whole modules, with a warning that says why; so is one
    whose `Job.modules` says where to cut.

    Raises: CaptureError if the model can be captured in neither way; CutError if Job.modules is wrong.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made = like.blueprint if like is not None else blueprint(job.model, fake)
    example = batch if batch is not None else sample_batch(job, 0, microbatch_size)
    _check_batch(example)
    _check_trainable(made.model, job)
    example = {key: tensor.clone() for key, tensor in example.items()}  # export merges equal tensors
    if like is not None and like.cut is not None:
        return _as_modules(job, example, made, like.cut.reason, autocast, like.cut)
    if job.modules is not None:
        return _as_modules(job, example, made, "Job.modules says where to cut", autocast)
    try:
        with python_random_kept():
            before = python_state()
            program = export(WithLoss(made.model, job), example, job.name, autocast)
            if python_state() != before:
                raise CaptureError(f"the forward of {job.name} draws random numbers that export would freeze")
        return from_program(program, job, made, list(example))
    except CaptureError as error:
        found = _instead(error, job, example, autocast)
    _log.warning("%s; cutting between its modules instead", found.graph.fallback)
    return found


def _instead(
    error: CaptureError, job: Job, batch: dict[str, Tensor], autocast: torch.dtype | None
) -> Captured:
    """Capture as modules what export refused."""
    made = blueprint(job.model, FakeTensorMode(allow_non_fake_inputs=True))  # export leaves traces in a model
    try:
        return _as_modules(job, batch, made, error.message, autocast)
    except CaptureError as second:
        if second.message == error.message:
            raise error from None
        raise CaptureError(f"{error.message}; and as modules: {second.message}", hint=second.hint) from error


def _as_modules(
    job: Job,
    batch: dict[str, Tensor],
    made: Blueprint,
    reason: str,
    autocast: torch.dtype | None,
    like: ModuleCut | None = None,
) -> Captured:
    graph, found = cut_modules(job, batch, made, reason=reason, autocast=autocast, like=like)
    return Captured(
        graph=graph,
        module=fx.GraphModule({}, fx.Graph()),
        targets={},
        updates={},
        blueprint=made,
        constants=found.skeleton.constants,
        autocast=autocast,
        cut=found,
    )


def _check_trainable(model: nn.Module, job: Job) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise CaptureError(
            f"no parameter of {job.name} requires a gradient, so there is nothing to train",
            hint="call requires_grad_() on what should learn",
        )


def _check_batch(batch: Mapping[str, Tensor]) -> None:
    if not isinstance(batch, Mapping):
        raise CaptureError(
            f"Job.batch returned a {type(batch).__name__}, not a dictionary",
            hint="let it return the arguments of the model's forward by name, as {'x': x, 'y': y}",
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"batch entry {key!r} is a {type(value).__name__}, not a tensor",
                hint="let Job.batch return tensors only; bind other arguments in Job.model",
            )
