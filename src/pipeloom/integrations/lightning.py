"""Lightning, with the module in a pipeline: `PipelineStrategy`.

To Lightning each rank looks like one process alone, of which only rank 0 logs and writes. The pipeline's
model is a copy of the module whose forward is its `training_step`, or in evaluation mode its
`validation_step`. The optimizer of `configure_optimizers` only has learning rates; the pipeline's steps.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from ..ir.errors import ConfigError, of_type
from ..pipeline import Pipeline
from ..ranks import rank_device, result_of_rank_0
from ..run_options import Options
from ..runtime.batches import off_mean
from ..runtime.connect import connect
from ..tracer.job_calls import evaluation_mode
from .as_one_process import (
    is_of_user,
    load_optimizer_states,
    mapped,
    optimizer_states,
    random_kept,
    repeated,
    state_of,
    with_enough_rows,
)

T = TypeVar("T")

OF_TRAINER = {"clip_norm": "gradient_clip_val", "autocast": "precision"}

GRADIENT_HOOKS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
"""They see gradients, or weights between two steps, which are on no rank as a whole."""

CHANGES_WEIGHTS = ("StochasticWeightAveraging", "WeightAveraging", "ModelPruning", "BaseFinetuning")
"""Callbacks that read or change the module while it is trained."""

SEE_WEIGHTS = (
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)
"""Hooks in which the module has the weights of that time, if they are the user's."""

_LOG = "log "
"""What the outputs of the pipeline that a step has logged are called, before their names."""


class PipelineStrategy(SingleDeviceStrategy):
    """Trains an unmodified `LightningModule` by all processes that torchrun has started together:
    `lightning.Trainer(strategy=PipelineStrategy(microbatches=4))`.

    Losses, validation losses, learning rates, logs and checkpoints are those of a Trainer on the CPU of one
    process, but for dropout, which draws other numbers. Of what `training_step` logs only its loss is; of
    what `validation_step` does, all that is a mean over rows. Hooks and callbacks see the weights at the ends
    of epochs and when validating, not between two steps. `fit` runs in the pipeline; `validate`, `test` and
    `predict` alone run in each process, with the whole module.

    pipeline: keywords of `Pipeline`, as microbatches=4, memory="16GiB" or device="cuda". It is made for the
        first batch that is seen.

    Raises: ConfigError for what a pipeline cannot do: manual optimization, hooks and callbacks that see
        gradients, accumulation of batches, clipping by value, float16, metrics that keep a state; a logged
        value that is no mean over rows; and all that `Pipeline` raises.
    """

    strategy_name = "pipeloom"

    def __init__(self, **pipeline: Any) -> None:
        super().__init__(device="cpu")  # where batches are made; the pipeline has its own
        for name in sorted(pipeline.keys() & OF_TRAINER.keys()):
            raise ConfigError(
                f"{name} is given to PipelineStrategy, and is the Trainer's",
                hint=f"see {OF_TRAINER[name]} of the Trainer",
            )
        self.global_rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.pipe: Pipeline | None = None
        self._settings = pipeline
        self._trainer: Any = None
        self._steps = _Steps()
        self._fits = self._updates = False
        self._modes: dict[str, bool] = {}
        self._seen: list[Any] = []

    # What Lightning asks of several processes

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if "RANK" not in os.environ and not dist.is_initialized():
            return None
        device = rank_device(Options(device=self._settings.get("device", "auto")))
        return connect(device, group=self._settings.get("group"))

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self._by_rank_0(lambda: obj)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Rank 0 decides, such as whether time is up."""
        return self._by_rank_0(lambda: decision)

    def _by_rank_0(self, make: Callable[[], T]) -> T:
        group = self._group
        return make() if group is None else result_of_rank_0(group, make)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if (group := self._group) is not None:
            dist.barrier(group=group)

    def setup_environment(self) -> None:
        """The accelerator is the pipeline's."""

    def setup(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fits = trainer.state.fn == "fit"
        if self._fits:
            _refuse(trainer, self.lightning_module)
            # Later it may be validating, as for the sanity check, with the module in evaluation mode.
            self._modes = {name: each.training for name, each in self.lightning_module.named_modules()}
            callbacks = [each for each in trainer.callbacks if not isinstance(each, _SeesWeights)]
            watchers = [self.lightning_module, *callbacks]
            if any(is_of_user(each, hook, "lightning") for each in watchers for hook in SEE_WEIGHTS):
                trainer.callbacks[:] = [_SeesWeights(self._take_weights), *callbacks]
        super().setup(trainer)

    # Training

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """The closure calls `training_step`, which is a whole step of the pipeline."""
        self._updates = True
        try:
            loss = closure()
        finally:
            self._updates = False
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that they are early
        return loss

    def training_step(self, batch: Any, *rest: Any) -> Tensor:
        if not self._updates:
            raise ConfigError(
                "a batch is to be trained on without an update",
                hint="let optimizer_step give its closure to the optimizer for every batch",
            )
        pipe = self._opened(batch)
        self._refuse_changes()
        for optimizer in pipe.weights.optimizers:
            for group, lightning in zip(optimizer.param_groups, self.optimizers[0].param_groups, strict=True):
                group.update({key: value for key, value in lightning.items() if key != "params"})
        rows = _rows(batch)
        with torch.inference_mode(False):
            loss = torch.tensor(pipe.step(with_enough_rows(batch, rows, pipe) if pipe.rank == 0 else None))
        self._log(dict.fromkeys(self._steps.training, loss), self._steps.training, rows)
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Done by the pipeline."""
        return closure_loss

    def on_train_end(self) -> None:
        """The module and its optimizer are then as those of one process."""
        if self.pipe is not None:
            state, optimizer = self.lightning_module_state_dict(), self.optimizers[0]
            optimizer.load_state_dict(self.optimizer_state(optimizer))
            self.lightning_module.load_state_dict(state)

    # Validation

    def validation_step(self, batch: Any, *rest: Any) -> Any:
        if not self._fits:
            return super().validation_step(batch, *rest)
        if len(rest) > 1:
            raise ConfigError("there are several validation loaders", hint="validate with one while fitting")
        pipe, rows = self._opened(batch), _rows(batch)
        if self._steps.validation is None:
            raise ConfigError(
                "validation_step neither returns nor logs a number",
                hint="log what it computes, or leave it out",
            )
        parts = repeated(batch, rows, pipe.plan.microbatches) if pipe.rank == 0 else None
        with torch.inference_mode(False), torch.enable_grad():
            loss, outputs = pipe.outputs(parts)
        logged = {}
        for name in self._steps.validation:
            if _LOG + name not in outputs:
                raise ConfigError(
                    f"validation_step logs {name}, which does not depend on the weights",
                    hint="log it in a hook, as on_validation_batch_end",
                )
            logged[name] = outputs[_LOG + name].double().mean().float()
        self._log(logged, self._steps.validation, rows)
        return torch.tensor(loss) if self._steps.returns_loss else None

    def _log(self, values: Mapping[str, Tensor], how: Mapping[str, dict[str, Any]], rows: int) -> None:
        for name, value in values.items():
            given = {**how[name], "sync_dist": True}  # all ranks have the same: nothing is sent
            if given.get("batch_size") is not None:
                given = {**given, "batch_size": rows}
            self.lightning_module.log(name, value, **given)

    # The pipeline

    def _opened(self, batch: Any) -> Pipeline:
        if self.pipe is None:
            with random_kept(), torch.inference_mode(False), torch.enable_grad():
                self.pipe = self._open(batch)
                self._seen = self._state()
        return self.pipe

    def _state(self) -> list[Any]:
        """Of the module's own numbers those that steps read: others may only count for its hooks."""
        module = self.lightning_module
        read = [(name, vars(module).get(name)) for name in self._steps.reads]
        return [*state_of(module, counts=False), *read]

    def _refuse_changes(self) -> None:
        if self._seen != self._state():
            raise ConfigError(
                "weights, buffers or numbers of the module, or what learns, were changed while ranks train "
                "theirs",
                hint="change them before fit(), and call that again; let the loader put into the batch what "
                "changes from step to step",
            )

    def _take_weights(self) -> None:
        """For hooks and callbacks that look at the module."""
        if self.pipe is not None:
            self._refuse_changes()
            with torch.inference_mode(False):
                self.lightning_module.load_state_dict(self.pipe.state_dict(frozen=False), strict=False)
            self._seen = self._state()

    def _open(self, batch: Any) -> Pipeline:
        trainer, module = self._trainer, self.lightning_module
        copied = _with_steps_as_forward(module, batch)
        for name, each in copied.named_modules():
            each.training = self._modes[name]
        weight = self._settings.get("weight")
        self._steps = self._by_rank_0(lambda: _look_at_steps(copied, batch, weighted=weight is not None))
        if self._steps.dropped and self.is_global_zero:
            warnings.warn(
                f"training_step logs {', '.join(self._steps.dropped)}: not logged, as only its loss leaves "
                "the pipeline. validation_step may log them.",
                stacklevel=2,
            )
        settings: dict[str, Any] = {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0"))}
        if trainer.gradient_clip_val:
            settings["clip_norm"] = float(trainer.gradient_clip_val)
        if trainer.precision == "bf16-mixed":
            settings["autocast"] = torch.bfloat16
        pipe = Pipeline(
            copied,
            example=batch,
            optimizer=self._make_optimizer,
            data="first",
            **settings | self._settings,
        )
        optimizer = self.optimizers[0]
        groups = self._grouped_names(optimizer)
        states = {
            name: optimizer.state[param]
            for names, group in zip(groups, optimizer.param_groups, strict=True)
            for name, param in zip(names, group["params"], strict=True)
            if param in optimizer.state
        }
        load_optimizer_states(pipe, states)
        optimizer.state.clear()
        pipe.steps_done = trainer.global_step
        return pipe

    def _make_optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> Optimizer:
        """Of the class of the optimizer of `configure_optimizers`, and with its groups."""
        optimizer, params = self.optimizers[0], dict(named_parameters)
        kind = type(optimizer)
        groups = [
            {**group, "params": [params[name] for name in names if name in params]}
            for names, group in zip(self._grouped_names(optimizer), optimizer.param_groups, strict=True)
        ]
        taken = inspect.signature(kind).parameters
        made: Optimizer = kind(groups, **{key: v for key, v in optimizer.defaults.items() if key in taken})
        return made

    def _grouped_names(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(param): name for name, param in self.lightning_module.named_parameters()}
        groups = optimizer.param_groups
        if any(id(param) not in names for group in groups for param in group["params"]):
            raise ConfigError(
                "configure_optimizers gives an optimizer of what is no parameter of the module",
                hint="give it self.parameters(), or groups of them",
            )
        return [[names[id(param)] for param in group["params"]] for group in groups]

    # Files

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state if self.pipe is None else state | self.pipe.state_dict(frozen=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As the optimizer of one process has it; on all ranks."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self.pipe is not None:
            names = [name for group in self._grouped_names(optimizer) for name in group]
            states = optimizer_states(self.pipe)
            state["state"] = {number: states[name] for number, name in enumerate(names) if name in states}
        return state

    def on_exception(self, exception: BaseException) -> None:
        """The other ranks are told."""
        if self.pipe is not None:
            pipe, self.pipe = self.pipe, None
            pipe.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        if self.pipe is not None:
            pipe, self.pipe = self.pipe, None
            pipe.close()
        super().teardown()


class _SeesWeights(Callback):
    """Before the other callbacks and the module's hooks."""

    def __init__(self, take_weights: Callable[[], None]) -> None:
        self.on_train_epoch_end = lambda *_: take_weights()
        self.on_validation_start = lambda *_: take_weights()


# The steps as a forward


@dataclass(kw_only=True)
class _Steps:
    """What the steps log: by name the keywords of `log`.

    training: what is the loss.  dropped: what is not.  validation: None if it gives no number.
    reads: the module's own attributes that they read and that are numbers.
    """

    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    validation: dict[str, dict[str, Any]] | None = None
    returns_loss: bool = False
    reads: set[str] = field(default_factory=set)


_READ: ContextVar[set[str] | None] = ContextVar("read", default=None)

_LOGGED: ContextVar[dict[str, tuple[Any, dict[str, Any]]] | None] = ContextVar("logged", default=None)
"""What the step that is running has logged. None outside: then `forward` is the step."""

_LOG_SIGNATURE = inspect.signature(LightningModule.log)


class _StepsAsForward:
    """Mixed in before the module's own class. Refuses to read what a captured step cannot know."""

    training: bool
    batch_kind: Any

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, int | float) and name != "training" and (read := _READ.get()) is not None:
            read.add(name)
        return value

    def forward(self, *parts: Any, **named: Any) -> Any:
        if _LOGGED.get() is not None:
            return super().forward(*parts, **named)  # type: ignore[misc]
        loss, logged = self.take_step("training_step" if self.training else "validation_step", parts, named)
        if self.training:
            return loss
        rows = len((*parts, *named.values())[0])
        rows_of = {_LOG + name: value.float().reshape(1).expand(rows) for name, (value, _) in logged.items()}
        if loss is None and logged:
            loss = next(value for value, _ in logged.values()).float()
        return {"loss": loss, **rows_of}

    def take_step(self, hook: str, parts: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """The loss of a step, and what it has logged."""
        batch: Any = named or self.batch_kind(parts)
        if self.batch_kind is Tensor:
            batch = parts[0]
        step = getattr(self, hook)
        counted = len(inspect.signature(step).parameters) > 1
        logged: dict[str, tuple[Any, dict[str, Any]]] = {}
        token = _LOGGED.set(logged)
        try:
            loss = step(batch, *([_NoIndex()] if counted else []))
        finally:
            _LOGGED.reset(token)
        if isinstance(loss, Mapping):
            loss = loss.get("loss")
        return (loss if isinstance(loss, Tensor) and loss.numel() == 1 else None), logged

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        how = dict(_LOG_SIGNATURE.bind(self, name, value, *args, **kwargs).arguments)
        logged = _LOGGED.get()
        assert logged is not None, "a step logs while it is taken"
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"{name} is logged, and is {of_type(value)}, no tensor of one number",
                hint="log tensors as they are computed; metrics that keep a state go into a hook",
            )
        if how.get("reduce_fx", "mean") not in ("mean", torch.mean):
            raise ConfigError(
                f"{name} is logged with reduce_fx={how['reduce_fx']}",
                hint="log means over rows",
            )
        logged[name] = value, {k: v for k, v in how.items() if k not in ("self", "name", "value")}

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)


def _not_known(name: str) -> property:
    def refuse(self: Any) -> Any:
        raise ConfigError(
            f"a step reads self.{name}, and is captured once for all batches",
            hint="let the loader put into the batch what depends on it",
        )

    return property(refuse)


for _name in ("trainer", "current_epoch", "global_step", "logger", "loggers", "optimizers", "lr_schedulers"):
    setattr(_StepsAsForward, _name, _not_known(_name))


class _NoIndex:
    """Stands for the number of a batch."""


def _refuse_index(*args: Any) -> Any:
    raise ConfigError(
        "a step reads the number of its batch, and is captured once for all batches",
        hint="let the loader put into the batch what depends on it",
    )


_ASKED = (
    "bool int float index str format eq ne lt le gt ge mod add sub mul floordiv truediv radd rsub rmul rmod"
)

for _name in _ASKED.split():
    setattr(_NoIndex, f"__{_name}__", _refuse_index)


def _with_steps_as_forward(module: LightningModule, batch: Any) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        copied = copy.deepcopy(module)
    own = type(module)
    kind = Tensor if isinstance(batch, Tensor) else list if isinstance(batch, list) else tuple
    kind = getattr(batch, "_make", kind)  # a NamedTuple's
    copied.__class__ = type(own.__name__, (_StepsAsForward, own), {"batch_kind": kind})
    return copied


def _look_at_steps(model: Any, batch: Any, *, weighted: bool) -> _Steps:
    """Take both steps on a batch and on its halves, in evaluation mode, to see what they log.

    weighted: the loss is a mean over something else than rows.
    """
    rows = _rows(batch)
    halves = [_sliced(batch, 0, rows // 2), _sliced(batch, rows // 2, rows)] if rows > 1 else []
    with evaluation_mode(model), torch.no_grad(), _numbers_read() as read:
        loss, logged = _step_of(model, "training_step", batch)
        if loss is None:
            raise ConfigError(
                "training_step returns no loss of one number",
                hint='let it return the loss, or {"loss": loss}',
            )
        steps = _Steps(reads=read)
        for name, (value, how) in logged.items():
            if value.data_ptr() == loss.data_ptr():
                steps.training[name] = _checked_rows(name, how, rows)
            else:
                steps.dropped.append(name)
        parts = [_step_of(model, "training_step", half)[0] for half in halves]
        if not weighted and not _is_mean(loss, parts, halves):
            warnings.warn(
                "the loss of training_step is no mean over rows, by which micro-batches are weighted. "
                "Give PipelineStrategy weight=, as `Pipeline` takes it.",
                stacklevel=2,
            )
        if type(model).validation_step is LightningModule.validation_step:
            return steps
        loss, logged = _step_of(model, "validation_step", batch)
        others = [_step_of(model, "validation_step", half)[1] for half in halves]
        steps.returns_loss = loss is not None
        if loss is None and not logged:
            return steps
        steps.validation = {}
        for name, (value, how) in logged.items():
            if any(name not in other for other in others) or not _is_mean(
                value, [other[name][0] for other in others], halves
            ):
                raise ConfigError(
                    f"validation_step logs {name}, which is no mean over the rows of a batch",
                    hint="log a mean, as of correct rows, and not their sum",
                )
            steps.validation[name] = _checked_rows(name, how, rows)
        return steps


@contextmanager
def _numbers_read() -> Iterator[set[str]]:
    read: set[str] = set()
    token = _READ.set(read)
    try:
        yield read
    finally:
        _READ.reset(token)


def _step_of(model: Any, hook: str, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model.take_step(hook, (), {name: value for name, value in batch.items() if value is not None})
    return model.take_step(hook, (batch,) if isinstance(batch, Tensor) else tuple(batch), {})


def _is_mean(whole: Tensor, parts: list[Tensor], batches: list[Any]) -> bool:
    if not parts:
        return True
    rows = [_rows(batch) for batch in batches]
    return off_mean(float(whole), [float(part) for part in parts], rows, least=1.0) <= 1e-4


def _checked_rows(name: str, how: dict[str, Any], rows: int) -> dict[str, Any]:
    if how.get("batch_size") not in (None, rows):
        raise ConfigError(
            f"{name} is logged with batch_size={how['batch_size']}, the batch has {rows} rows",
            hint="leave batch_size out, or give the number of rows",
        )
    return how


# Batches


def _tensors(batch: Any) -> list[Tensor]:
    values = [batch] if isinstance(batch, Tensor) else batch.values() if isinstance(batch, Mapping) else batch
    return [value for value in values if isinstance(value, Tensor) and value.ndim]


def _rows(batch: Any) -> int:
    tensors = _tensors(batch) if isinstance(batch, Tensor | Mapping | list | tuple) else []
    if not tensors:
        raise ConfigError(
            f"a batch is {of_type(batch)} without tensors",
            hint="let the loader give a tensor, a tuple of tensors, or a dictionary of them",
        )
    return len(tensors[0])


def _sliced(batch: Any, start: int, stop: int) -> Any:
    return mapped(batch, lambda tensor: tensor[start:stop])


def _refuse(trainer: Any, module: LightningModule) -> None:
    """Raises: ConfigError for what a pipeline cannot do."""
    if not module.automatic_optimization:
        raise ConfigError("the module optimizes by hand", hint="let automatic_optimization be True")
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"{trainer.accumulate_grad_batches} batches are to be accumulated",
            hint="make the loader's batches larger instead: the pipeline splits them into micro-batches",
        )
    if trainer.gradient_clip_val and getattr(trainer.gradient_clip_algorithm, "value", "norm") != "norm":
        raise ConfigError("gradients are to be clipped by value", hint='use gradient_clip_algorithm="norm"')
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigError(f"the precision is {trainer.precision}", hint='use "32-true" or "bf16-mixed"')
    for name, each in module.named_modules():
        if isinstance(each, Metric):
            raise ConfigError(
                f"{name} is a metric of torchmetrics, which keeps a state between batches",
                hint="log what torchmetrics.functional computes",
            )
    for owner, base in ((module, LightningModule), *((each, Callback) for each in trainer.callbacks)):
        kind = type(owner)
        for hook in GRADIENT_HOOKS:
            if getattr(kind, hook, None) is not getattr(base, hook, None):
                raise ConfigError(
                    f"{kind.__name__} has {hook}, and no rank has all gradients",
                    hint="leave it out; clip_norm and gradient norms are the pipeline's",
                )
        if any(each.__name__ in CHANGES_WEIGHTS for each in kind.__mro__):
            raise ConfigError(
                f"{kind.__name__} reads or changes weights while they are trained, and no rank has all",
                hint="leave it out",
            )
