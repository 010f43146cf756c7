"""What one rank saves and restores, as flat named tensors plus plain values.

Keys do not depend on the plan: `model.<fqn>` for parameters and buffers, `optimizer.<fqn>.<state name>`
for optimizer state that is a tensor. Hyper-parameters belong to a parameter, not to a numbered group, so
that they find their way when parameters are spread over other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...ir.errors import CheckpointError, shown
from .files import SCHEMA, Index

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """One rank's part of the training state.

    parameters, buffers: original FQN -> tensor; loading fills these tensors in place. A tied parameter
        stands under its first FQN on every rank that has a replica; the lowest such rank writes it.
    optimizers: each parameter they hold must be one of `parameters` (the same object).
    aliases: other FQN of a tied parameter -> its first FQN.
    previous: trained parameters of the version before the newest, see `ir.weights`; empty without one.
        Loading adds those that the checkpoint has, if `keeps_previous`.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizers: tuple[Optimizer, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    previous: dict[str, Tensor] = field(default_factory=dict)
    keeps_previous: bool = False

    @property
    def model(self) -> dict[str, Tensor]:
        """Parameters and buffers by FQN, without their autograd history."""
        return {name: tensor.detach() for name, tensor in {**self.parameters, **self.buffers}.items()}

    def optimized(self) -> Iterator[tuple[Optimizer, dict[str, Any], list[str]]]:
        """(optimizer, one of its parameter groups, the FQNs in that group)."""
        names = {id(tensor): name for name, tensor in self.parameters.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                foreign = [p for p in group["params"] if id(p) not in names]
                if foreign:
                    raise CheckpointError(
                        f"the optimizer holds a {list(foreign[0].shape)} tensor that is not the model's",
                        hint="give the optimizer the parameters it is called with, and nothing else",
                    )
                yield optimizer, group, [names[id(p)] for p in group["params"]]


def flatten(state: TrainState, *, step: int, extra: Mapping[str, Any]) -> tuple[dict[str, Tensor], Index]:
    """This rank's tensors by checkpoint key, and its part of the index.

    Raises: CheckpointError if the optimizer keeps something that is neither a tensor nor a plain value.
    """
    model = state.model
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    tensors |= {f"previous.{name}": tensor.detach() for name, tensor in state.previous.items()}
    kinds: dict[str, str] = {}
    groups: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for optimizer, group, names in state.optimized():
        hyper = {key: _plain_hyper(key, value) for key, value in group.items() if key != "params"}
        for name, parameter in zip(names, group["params"], strict=True):
            kinds[name], groups[name] = type(optimizer).__name__, hyper
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value.detach()
                elif isinstance(value, _PLAIN):
                    values.setdefault(name, {})[key] = value
                else:
                    raise CheckpointError(
                        f"optimizer state {key!r} of {name} is a {type(value).__name__}",
                        hint="checkpoints hold optimizer state that is tensors, numbers, strings or None",
                    )
    return tensors, Index(
        schema=SCHEMA,
        step=step,
        extra=extra,
        aliases=state.aliases,
        model={name: (tuple(t.shape), dtype_name(t)) for name, t in model.items()},
        optimizers=kinds,
        groups=groups,
        values=values,
    )


def empty_like_saved(state: TrainState, index: Index, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors to fill: the live model, and fresh ones for the optimizer state.

    saved: every tensor of the checkpoint by key, without data (on the meta device).
    Raises: CheckpointError if the checkpoint does not fit this rank's part of the model.
    """
    tensors_to_fill = {f"model.{name}": tensor for name, tensor in state.model.items()}
    for name, tensor in state.model.items():
        _refuse_mismatch(name, tensor, index)
    for name, parameter in state.parameters.items() if state.keeps_previous else ():
        if (key := f"previous.{name}") in saved:
            state.previous[name] = tensors_to_fill[key] = torch.empty_like(parameter.detach())
    for optimizer, _, names in state.optimized():
        for name in names:
            kind = index.optimizers.get(name)
            if kind != type(optimizer).__name__:
                was = "no optimizer" if kind is None else shown(kind)
                raise CheckpointError(
                    f"{name} is trained with {type(optimizer).__name__}, the checkpoint was saved with {was}",
                    hint="use the optimizer of the checkpoint, or load the parameters alone",
                )
            prefix = f"optimizer.{name}."
            for key, like in saved.items():
                if key.startswith(prefix):
                    tensors_to_fill[key] = torch.empty(like.shape, dtype=like.dtype)
        if names:
            _common_hyper(names, index)
    return tensors_to_fill


def restore_optimizers(state: TrainState, index: Index, tensors: Mapping[str, Tensor]) -> None:
    """Put loaded optimizer state into the optimizers, fresh ones included.

    Raises: CheckpointError if parameters of one group were saved with different hyper-parameters, or if an
        optimizer does not take its state.
    """
    for optimizer in state.optimizers:
        only_this = TrainState(parameters=state.parameters, optimizers=(optimizer,))
        plain = optimizer.state_dict()
        restored: dict[int, dict[str, Any]] = {}
        for (_, group, names), numbered in zip(only_this.optimized(), plain["param_groups"], strict=True):
            if not names:
                continue
            saved = _common_hyper(names, index)
            for key, value in saved.items():
                numbered[key] = _like_live(value, group.get(key))
            for name, number in zip(names, numbered["params"], strict=True):
                if saved_state := _state_of(name, index, tensors):
                    restored[number] = saved_state
        groups = optimizer.param_groups
        try:
            optimizer.load_state_dict({"state": restored, "param_groups": plain["param_groups"]})
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{type(optimizer).__name__} cannot take its state from the checkpoint: "
                f"{type(error).__name__}: {error}",
                hint="load an earlier checkpoint, or the parameters alone",
            ) from None
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups  # the same objects: one that holds several optimizers may list them


def dtype_name(tensor: Tensor) -> str:
    """
    >>> dtype_name(torch.zeros(1))
    'float32'
    """
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_mismatch(name: str, tensor: Tensor, index: Index) -> None:
    if name not in index.model:
        raise CheckpointError(f"the checkpoint has no tensor {name}", hint="load a checkpoint of this model")
    shape, dtype = index.model[name]
    if (tuple(shape), dtype) != (tuple(tensor.shape), dtype_name(tensor)):
        raise CheckpointError(
            f"{name} is {list(tensor.shape)} {dtype_name(tensor)}, the checkpoint has {list(shape)} {dtype}",
            hint="build the model with the sizes and the dtype of the checkpoint",
        )


def _plain_hyper(key: str, value: Any) -> Any:
    """A hyper-parameter as JSON: a scalar tensor (capturable optimizers) becomes its number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain_hyper(key, v) for v in value]
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"optimizer setting {key!r} is a {type(value).__name__}",
        hint="checkpoints hold settings that are numbers, strings, None, or lists of these",
    )


def _like_live(value: Any, live: Any) -> Any:
    """JSON knows neither tuples nor tensors: follow the type of the live optimizer's setting."""
    if isinstance(live, Tensor):
        return torch.full_like(live, value)
    return tuple(value) if isinstance(live, tuple) else value


def _common_hyper(names: list[str], index: Index) -> Mapping[str, Any]:
    for name in names:
        if name not in index.groups:
            raise CheckpointError(
                f"the checkpoint has no optimizer settings of {name}", hint="load another checkpoint"
            )
    first = index.groups[names[0]]
    for name in names[1:]:
        differing = [key for key, value in index.groups[name].items() if first.get(key) != value]
        if differing:
            key = differing[0]
            raise CheckpointError(
                f"{names[0]} and {name} are in one optimizer group, "
                f"but were saved with {key} {first.get(key)} and {index.groups[name][key]}",
                hint="make the same parameter groups as when the checkpoint was saved",
            )
    return first


def _state_of(name: str, index: Index, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    prefix = f"optimizer.{name}."
    saved_tensors: dict[str, Any] = {
        key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)
    }
    return saved_tensors | dict(index.values.get(name, {}))
