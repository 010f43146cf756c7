"""nn.Module with a loss -> OpGraph, by torch.export.

The exported forward graph is made functional (no in-place calls; buffer updates are outputs) while
composite operations such as `linear` and `scaled_dot_product_attention` stay whole, so that each device
picks its own kernel. The model runs on fake tensors: its size does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.errors import CaptureError, of_type
from ..ir.user_code import at, own_definition
from .autocast import Autocast
from .blueprint import Blueprint, make_blueprint
from .captured import Captured
from .example import given_to
from .export import FOREIGN_AT, export_watched
from .given_model import LossError, captured_copy
from .guards import (
    backward_hooks,
    keep_attributes,
    refuse_parameter_hooks,
    statistics_in_checkpoints_refused,
    warn_once,
)
from .job import Job
from .job_calls import ModelWithLoss, sample_batch
from .modules.cut import ModuleCut, cut_modules
from .program import captured_from_program
from .random import one_thread_at_a_time
from .split_words import split_words

_ROWS_HINT = "let Job.batch return tensors whose first dimension is its second argument"


@one_thread_at_a_time
def capture(
    job: Job,
    microbatch_size: int,
    *,
    batch: Mapping[str, Tensor] | None = None,
    autocast: Autocast | None = None,
    like: Captured | None = None,
    split: Mapping[str, int] | None = None,
) -> Captured:
    """Capture a job's model and loss for one micro-batch.

    batch: a micro-batch to take the shapes from; by default `job.batch(0, microbatch_size)`.
    autocast: mixed precision, or None.
    like: an earlier capture of the same job, for a batch of other shapes: the model is not built again.
    split: weights to cut by words, see `split_words`; by default those of `like`.
    A model that cannot be exported is captured as whole modules, with a warning that says why; so is one
    whose `Job.modules` says where to cut.

    Raises: CaptureError if the model can be captured in neither way; CutError if Job.modules is wrong;
        PlanError if it cannot be split so.
    """
    if batch is None and microbatch_size < 1:
        raise CaptureError(f"microbatch_size is {microbatch_size}", hint="give micro-batches 1 row or more")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    blueprint = like.blueprint if like is not None else make_blueprint(job.model, fake)
    example = batch if batch is not None else sample_batch(job, 0, microbatch_size)
    _check_batch(example)
    if batch is None:
        _check_rows(example, microbatch_size)
    _check_state(blueprint.model, job)
    refuse_parameter_hooks(blueprint.hooks, job.name)
    example = {key: tensor.clone() for key, tensor in example.items()}  # export merges equal tensors
    if split is None:
        split = like.split_words if like is not None else {}
    with statistics_in_checkpoints_refused(job.name), captured_copy(given_to(job), blueprint.model):
        captured = _captured(job, example, blueprint, autocast, like)
    if not any(parameter.trainable for parameter in captured.graph.parameters):
        raise CaptureError(
            f"the loss of {job.name} has no gradient for any parameter of the model",
            hint="let the forward use them; a function that was put in the place of a forward may still use "
            "the module of which the model is a copy: give a function that makes the model instead",
        )
    return split_words(captured, split)


def _captured(
    job: Job,
    example: dict[str, Tensor],
    blueprint: Blueprint,
    autocast: Autocast | None,
    like: Captured | None,
) -> Captured:
    if like is not None and like.cut is not None:
        return _as_modules(job, example, blueprint, like.cut.reason, autocast, like.cut)
    if job.modules is not None:
        return _as_modules(job, example, blueprint, "Job.modules says where to cut", autocast)
    try:
        return _exported(job, example, blueprint, autocast)
    except LossError:  # no way of capturing would help
        raise
    except CaptureError as error:
        captured = _capture_instead(error, job, example, autocast)
    instead = "; cutting between its modules instead" if len(captured.graph.ops) > 1 else ""
    warn_once(f"{captured.graph.fallback}{instead}")
    return captured


def _exported(
    job: Job, example: dict[str, Tensor], blueprint: Blueprint, autocast: Autocast | None
) -> Captured:
    """The model by torch.export. Raises: CaptureError if that cannot be, or would lose something."""
    _refuse_backward_hooks(blueprint.model, job.name)
    program = export_watched(ModelWithLoss(blueprint.model, job), example, job.name, autocast)
    _refuse_backward_hooks(blueprint.model, job.name)  # the forward may have put on some
    if foreign := program.graph_module.meta.get(FOREIGN_AT):
        warn_once(
            f"{job.name} computes with parameters that are not the model's{at(foreign[0])}: nothing trains "
            "them; if they should learn, give a model that has them"
        )
    captured = captured_from_program(program, job, blueprint, list(example))
    return replace(captured, autocast=autocast)


def _capture_instead(
    error: CaptureError, job: Job, batch: dict[str, Tensor], autocast: Autocast | None
) -> Captured:
    """Capture as modules what export refused."""
    # A new one: export leaves traces in a model.
    blueprint = make_blueprint(job.model, FakeTensorMode(allow_non_fake_inputs=True))
    try:
        with captured_copy(given_to(job), blueprint.model):
            return _as_modules(job, batch, blueprint, error.message, autocast)
    except LossError as second:  # no way of capturing would help
        raise second from error
    except CaptureError as second:
        if second.message == error.message:
            raise error from None
        raise CaptureError(f"{error.message}; and as modules: {second.message}", hint=second.hint) from error


def _as_modules(
    job: Job,
    batch: dict[str, Tensor],
    blueprint: Blueprint,
    reason: str,
    autocast: Autocast | None,
    like: ModuleCut | None = None,
) -> Captured:
    graph, module_cut = cut_modules(job, batch, blueprint, reason=reason, autocast=autocast, like=like)
    return Captured(
        graph=graph,
        module=fx.GraphModule({}, fx.Graph()),
        targets={},
        updates={},
        blueprint=blueprint,
        constants=module_cut.skeleton.constants,
        autocast=autocast,
        cut=module_cut,
        put_back_attributes=keep_attributes(blueprint.model),
    )


def _check_state(model: nn.Module, job: Job) -> None:
    if not model.training:
        warn_once(
            f"{job.name} is in evaluation mode, as models are after from_pretrained, and trains so: without "
            "dropout; call its train() first"
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise CaptureError(
            f"no parameter of {job.name} requires a gradient, so there is nothing to train",
            hint="call requires_grad_() on what should learn",
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name} of {job.name}{at(own_definition(type(model)))} is sparse, which no rank can keep",
                hint="keep its indices and values in buffers, and make it of them in the forward of a module",
            )


def _refuse_backward_hooks(model: nn.Module, name: str) -> None:
    for hook in backward_hooks(model):
        raise CaptureError(f"{hook.owner or name} has a hook by {hook}, which torch.export would lose")


def _check_batch(batch: Mapping[str, Tensor]) -> None:
    if not isinstance(batch, Mapping):
        raise CaptureError(
            f"Job.batch returned {of_type(batch)}, not a dictionary",
            hint="let it return the arguments of the model's forward by name, as {'x': x, 'y': y}",
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"batch entry {key!r} is {of_type(value)}, not a tensor",
                hint="let Job.batch return tensors only; bind other arguments in Job.model",
            )
        if not value.ndim:
            raise CaptureError(f"batch entry {key!r} is a tensor without rows", hint=_ROWS_HINT)


def _check_rows(batch: Mapping[str, Tensor], rows: int) -> None:
    """What is no tensor's number of rows has not been asked of the job."""
    made = {name: len(tensor) for name, tensor in batch.items()}
    if made and rows not in made.values():
        told = ", ".join(f"{name} of {count}" for name, count in made.items())
        raise CaptureError(f"Job.batch was asked for {rows} rows and made {told}", hint=_ROWS_HINT)
