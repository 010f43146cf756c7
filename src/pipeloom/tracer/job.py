"""Job: everything pipeloom needs to know about what the user trains; and how it is found by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ..ir.errors import ConfigError, did_you_mean, of_type
from ..ir.user_code import call_own, load_user_file, own_errors_told

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """An unmodified model, batches for it, and how it is trained.

    model: makes the `nn.Module`. Called under a fake-tensor mode when it is captured, and again on each
        rank, so it must not depend on global state and must give the same structure each time.
    batch: (seed, micro-batch size) -> keyword arguments of the model's forward, tensors with the
        micro-batch as their first dimension. With `loss`, also what only the loss reads.
    loss: (outputs, batch) -> scalar tensor. By default the model's own output `.loss` (or `["loss"]`).
    weight: batch -> the number of tokens that the loss averages over, a number or a scalar tensor. With it,
        the loss of a step is the average over all tokens of all micro-batches; without it each micro-batch's
        loss counts by its number of rows.
    optimizer: parameters -> torch optimizer, or an object whose `step` runs several that it holds in its
        attributes. If its first argument is called `named_parameters`, it gets pairs (name, parameter). Each
        rank calls it with all parameters that are trained, in the model's order; those of other ranks have
        no data (they are on the meta device). By default AdamW(lr=1e-3).
    name: what messages, graphs and reports call the model. By default as its file or module.
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

    loss_setting: ClassVar[str] = "Job.loss"
    """What messages call the place where a loss is given."""


_HINT = "name a pipeloom.Job, or a function that returns one, as file.py:name or package.module:name"


def load_job(spec: str) -> Job:
    """Import the module and call the function, if the job is not there itself; of a file by itself, `job`.

    Raises: ConfigError if the file, module or function is missing, the function wants arguments, or what
        it returns is no Job; and for an exception inside the user's code, which is its cause.
    """
    where, colon, name = (spec, ":", "job") if spec.endswith(".py") else spec.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"model {spec!r} names no function", hint=_HINT)
    module = load_user_file(Path(where), hint=_HINT) if where.endswith(".py") else _from_name(where, name)
    function = getattr(module, name, None)
    if isinstance(function, Job):
        return _named(function, where, name)
    if not callable(function):
        what = "has no function" if function is None else "has something that is not a function under"
        known = [n for n in vars(module) if callable(getattr(module, n))]
        raise ConfigError(f"{where} {what} {name}", hint=did_you_mean(name, known, _HINT))
    job = call_own(spec, function, hint=_HINT)
    if not isinstance(job, Job):
        raise ConfigError(f"{spec} returned {of_type(job)} instead of a pipeloom.Job", hint=_HINT)
    return _named(job, where, name)


def _named(job: Job, where: str, name: str) -> Job:
    """A job without a name of its own is called as where it stands, as mine.small of mine.py:small; and as
    mine if it is mine.py:job."""
    if job.name != Job.name:
        return job
    module = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    return replace(job, name=module if name == "job" else f"{module}.{name}")


def _from_name(name: str, function: str) -> ModuleType:
    if os.sep in name or not all(name.split(".")):
        near = f"did you mean {name}.py:{function}?" if Path(f"{name}.py").is_file() else _HINT
        raise ConfigError(f"{name!r} is no name of a module", hint=near)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    with own_errors_told(f"{name} cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise  # something that the module itself wants is missing
            raise ConfigError(f"there is no module {name}", hint=_HINT) from None
