"""The module that a script has given, of which a pipeline trains a copy: a loss that reads what is trained or
changed there would get what it was before the first step.

    loss = lambda output, target: mse(output, target) + sum(p.square().sum() for p in net.parameters())
    pipe = Pipeline(net, example, loss=loss)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from ..ir.errors import CaptureError

_CAPTURED: ContextVar[tuple[nn.Module, nn.Module] | None] = ContextVar("captured", default=None)
"""The module that was given, and the copy of it that is being captured."""

_OF_TORCH = frozenset(vars(nn.Module()))


class LossError(CaptureError):
    """The job's loss fails, or cannot be captured in any way."""


@contextmanager
def captured_copy(given: nn.Module | None, copy: nn.Module) -> Iterator[None]:
    token = _CAPTURED.set(None if given is None else (given, copy))
    try:
        yield
    finally:
        _CAPTURED.reset(token)


@contextmanager
def given_watched(name: str) -> Iterator[None]:
    """While a loss is captured in the block, it raises LossError if it reads a parameter of the module that
    was given, or an attribute that the forward has changed in the copy."""
    if (captured := _CAPTURED.get()) is None:
        yield
        return
    given, copy = captured
    twins, kinds = dict(copy.named_modules()), list[tuple[nn.Module, type]]()
    try:
        for path, module in given.named_modules():
            if path in twins:
                kinds.append((module, type(module)))
                module.__class__ = _watching(type(module), vars(twins[path]), name)
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def _watching(kind: Any, twin: Mapping[str, Any], name: str) -> type:
    def refuse(attribute: str) -> None:
        raise LossError(
            f"the loss of {name} reads {attribute} of the module that was given: the pipeline trains a copy",
            hint="compute it in the forward, and return it with the outputs or as a part of the loss",
        )

    def get(self: Any, attribute: str) -> Any:
        value = kind.__getattribute__(self, attribute)
        if attribute == "_parameters":
            for parameter in value.values():
                if parameter is not None and parameter.requires_grad:
                    refuse("parameters")
        elif attribute not in _OF_TORCH and attribute in kind.__getattribute__(self, "__dict__"):
            if _changed(value, twin.get(attribute, value)):
                refuse(attribute)
        return value

    def get_state(self: Any, attribute: str) -> Any:
        value = kind.__getattr__(self, attribute)
        if isinstance(value, Tensor) and value.requires_grad:
            refuse(attribute)
        return value

    own = {"__getattribute__": get, "__getattr__": get_state, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def _changed(given: Any, copied: Any) -> bool:
    """Whether an attribute is not what it is in the copy, whose forward has run.

    >>> _changed(0.0, 0.5), _changed([1], [1]), _changed([], [1.0]), _changed(None, None)
    (True, False, True, False)
    """
    if isinstance(copied, Tensor):
        return copied.requires_grad or not isinstance(given, Tensor)
    if isinstance(copied, int | float | str | None):
        return type(given) is not type(copied) or given != copied
    if isinstance(copied, Mapping) and isinstance(given, Mapping):
        return given.keys() != copied.keys() or any(_changed(given[key], copied[key]) for key in copied)
    if isinstance(copied, Sequence) and isinstance(given, Sequence):
        return len(given) != len(copied) or any(map(_changed, given, copied))
    return False
