"""What a trainer made for one process wants of a pipeline: optimizer states, random numbers, even batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from ..ir.graph import PartRows
from ..pipeline import Pipeline
from ..runtime.checkpoint import joined
from ..tracer.random import python_random_kept


def optimizer_states(pipe: Pipeline) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter of the user's model, on the CPU. Every rank calls it."""
    mine = {
        name: {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in optimizer.state[param].items()
        }
        for optimizer in pipe.weights.optimizers
        for name, param in pipe.weights.params.items()
        if param in optimizer.state
    }
    merged: dict[str, dict[str, Any]] = {}
    for theirs in pipe.channel.all_gather_object(mine):
        merged = {**theirs, **merged}
    rows = pipe.captured.graph.rows
    whole: dict[str, dict[str, Any]] = {}
    for name, state in merged.items():  # numbers, as the count of updates, are alike for all parts of one
        whole.setdefault(rows[name].whole if name in rows else name, {}).update(state)
    for key in {key for name in merged.keys() & rows.keys() for key in merged[name]}:
        parts = {n: merged[n][key] for n in merged.keys() & rows.keys() if _has_rows(merged[n][key], rows[n])}
        for name, tensor in joined(parts, rows).items():
            whole[name][key] = tensor
    return whole


def load_optimizer_states(pipe: Pipeline, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Take those of this rank's parameters, or of the parts of them that it has."""
    trained = {
        param: (optimizer.state, group.get("fused") or group.get("capturable"))
        for optimizer in pipe.weights.optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    }
    for name, param in pipe.weights.params.items():
        part = pipe.captured.graph.rows.get(name)
        if param not in trained or (whole := part.whole if part else name) not in states:
            continue
        state_of, counts_on_device = trained[param]
        state = state_of[param] = {}
        for key, value in states[whole].items():
            if isinstance(value, Tensor):
                if part is not None and value.ndim and len(value) == part.of:
                    value = value[part.start : part.stop]
                value = value.to(param.device if value.ndim or counts_on_device else "cpu", copy=True)
            state[key] = value


def _has_rows(value: Any, part: PartRows) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == part.stop - part.start


def state_of(model: nn.Module, *, counts: bool = True) -> list[Any]:
    """What tells that somebody has changed a model of which the ranks have copies: its tensors, and numbers
    in attributes of its modules. counts: also in those of its own, which may only count for its hooks."""
    tensors = [(each.requires_grad, each._version) for each in (*model.parameters(), *model.buffers())]
    numbers = [
        (name, value)
        for module in model.modules()
        if counts or module is not model
        for name, value in vars(module).items()
        if isinstance(value, int | float) and name[:1] != "_" and name != "training"
    ]
    return [*tensors, *numbers]


def is_of_user(owner: Any, hook: str, library: str) -> bool:
    """Whether somebody else than the library has defined this hook of a module or callback."""
    defined = getattr(owner, hook, None)
    return defined is not None and not getattr(defined, "__module__", "").startswith(f"{library}.")


def repeated(batch: Any, rows: int, parts: int) -> Any:
    """A batch over and over until it can be split evenly: means over its rows stay."""
    return mapped(batch, lambda tensor: torch.cat([tensor] * (parts // gcd(rows, parts))))


def with_enough_rows(batch: Any, rows: int, pipe: Pipeline) -> Any:
    """A batch to train on, over and over if it has fewer rows than a step has micro-batches."""
    parts = pipe.plan.microbatches
    return batch if rows >= parts else repeated(batch, rows, parts)


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with its tensors changed: one, a dictionary or a sequence of them."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {n: change(value) if isinstance(value, Tensor) else value for n, value in batch.items()}
    make = getattr(batch, "_make", type(batch))  # a NamedTuple's
    return make([change(value) if isinstance(value, Tensor) else value for value in batch])


@contextmanager
def random_kept() -> Iterator[None]:
    """What is looked at beforehand draws no numbers."""
    with python_random_kept(), torch.random.fork_rng(devices=[]):
        yield
