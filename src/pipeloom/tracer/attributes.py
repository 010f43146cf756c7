"""Python values in attributes of modules: which of them a forward carries from one call to the next.

A graph is traced from one call, and code between modules runs on several ranks: neither sees what an earlier
call has left, such as a counter of steps. So while a forward is traced, reads and writes of attributes are
watched, and values are compared with what they were before.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..ir.errors import CaptureError
from .user_code import at, definition_of, line_of, user_line

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, str, bytes, type(None))
_OPAQUE = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device)
_LONG, _DEEP = 1000, 4
"""Items and levels of a value that are looked at."""

_ABSENT = "no such attribute"


@dataclass(eq=False)
class _Uses:
    """Lines that write an attribute; those that read it, but for those that only make its next value.

    since: lines that have read it since it was written last.  read_first: before the first write.
    """

    writes: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    since: set[str] = field(default_factory=set)
    read_first: bool = False

    def read(self, line: str) -> None:
        self.read_first = self.read_first or not self.writes
        self.since.add(line)

    def write(self, line: str) -> None:
        self.reads |= self.since - {line}
        self.since.clear()
        self.writes.add(line)


@dataclass(frozen=True, kw_only=True)
class CarriedAttribute:
    """An attribute by which one call of a forward hands a Python value to the next.

    module: FQN, "" for the model itself.  kind: the module's class.  where: file and line that changes it.
    read_at: where code between modules reads it, if it is a module that is not cut that changes it.
    """

    module: str
    kind: str
    attribute: str
    where: str
    read_at: str = ""

    def refuse(self) -> None:
        """Raises: CaptureError that says what to do instead."""
        who = f"the forward of {self.module or 'the model'} ({self.kind})"
        if self.read_at:
            raise CaptureError(
                f"{who} changes its attribute {self.attribute}, and code between modules reads it"
                f"{at(self.read_at)}: other ranks do not see the change",
                hint="return it as a tensor, or move what reads it into the same module",
            )
        raise CaptureError(
            f"{who} changes its attribute {self.attribute}{at(self.where)} and reads it in the next call: "
            "a traced graph, and other ranks, do not see that",
            hint=f"keep it in a buffer: self.register_buffer({self.attribute!r}, torch.zeros(())) in the "
            "constructor, and change that in place; or move what uses it into the forward of one module",
        )


class AttributeWatch:
    """Watches a model's modules in `watching`. `carried` says what was found.

    units: FQNs of modules that are not cut: what they keep to themselves is no concern of others.
    inside: whether such a module runs now.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Collection[str] = (),
        inside: Callable[[], bool] = lambda: False,
    ) -> None:
        self.modules = dict(model.named_modules())
        self._units = {path for path in self.modules if any(is_below(path, unit) for unit in units)}
        self._inside = inside
        self._paths = {id(module): path for path, module in self.modules.items()}
        self._before = self._now = self._pictures()
        self._uses: dict[tuple[int, str], _Uses] = {}

    def _pictures(self) -> dict[tuple[int, str], Any]:
        seen: dict[int, Any] = {}
        return {
            (id(module), key): _picture(value, seen)
            for module in self.modules.values()
            for key, value in vars(module).items()
            if key not in _OF_EVERY_MODULE
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Other threads must not call modules meanwhile."""
        set_attribute = nn.Module.__setattr__

        def watched_getattribute(module: nn.Module, name: str) -> Any:
            if name not in _OF_EVERY_MODULE and name[:2] != "__" and self._is_watched(module):
                self._uses.setdefault((id(module), name), _Uses()).read(_line(sys._getframe(1)))
            return object.__getattribute__(module, name)

        def watched_setattr(module: nn.Module, name: str, value: Any) -> None:
            if name not in _OF_EVERY_MODULE and self._is_watched(module):
                self._uses.setdefault((id(module), name), _Uses()).write(_line(sys._getframe(1)))
            set_attribute(module, name, value)

        type.__setattr__(nn.Module, "__getattribute__", watched_getattribute)
        type.__setattr__(nn.Module, "__setattr__", watched_setattr)
        try:
            yield
        finally:
            type.__setattr__(nn.Module, "__setattr__", set_attribute)
            type.__delattr__(nn.Module, "__getattribute__")

    def _is_watched(self, module: nn.Module) -> bool:
        path = self._paths.get(id(module))
        return path is not None and not (path in self._units and self._inside())

    def look(self) -> None:
        """The forward has ended. Called in time: torch.export puts attributes back."""
        self._now = self._pictures()

    def carried(self) -> Iterator[CarriedAttribute]:
        """Attributes that were changed, and whose former value was used.

        What only adds to itself, as a counter that nothing looks at, is not among them; nor is a tensor.
        """
        now = self._now
        for owner, key in now:
            uses = self._uses.get((owner, key))
            changed = now[owner, key] != self._before.get((owner, key), _ABSENT)
            if uses is None or not changed or now[owner, key] == _TENSOR:
                continue
            if not uses.writes or (uses.read_first and uses.reads | uses.since):
                path = self._paths[owner]
                kind = type(self.modules[path])
                yield CarriedAttribute(
                    module=path,
                    kind=kind.__name__,
                    attribute=key,
                    where=min(uses.writes, default=definition_of(kind)),
                    read_at=min(uses.reads | uses.since) if path in self._units else "",
                )


def is_below(path: str, unit: str) -> bool:
    """Whether a module is a unit or inside it.

    >>> is_below("blocks.1.norm", "blocks.1"), is_below("blocks.10", "blocks.1"), is_below("blocks.1", "")
    (True, False, True)
    """
    return not unit or path == unit or path.startswith(f"{unit}.")


_TENSOR = "a tensor"


def _line(frame: FrameType) -> str:
    return user_line(frame) or line_of(frame)


def _picture(value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
    """Something that is equal for equal values. seen: pictures of objects, by id."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (float, complex, itertools.count)):
        return repr(value)
    if isinstance(value, Tensor):
        return _TENSOR
    if isinstance(value, _OPAQUE) or depth > _DEEP:
        return type(value).__name__
    if id(value) not in seen:
        seen[id(value)] = None  # where it holds itself
        seen[id(value)] = _picture_of_object(value, seen, depth + 1)
    return seen[id(value)]


def _picture_of_object(value: Any, seen: dict[int, Any], depth: int) -> Any:
    state = _state_of(value)
    if state is not None:
        return repr(state.tolist() if isinstance(state, Tensor) else state)
    if isinstance(value, np.ndarray):
        return value.shape, repr(value)
    if isinstance(value, Mapping):
        pairs = itertools.islice(value.items(), _LONG)
        return len(value), tuple((_picture(k, seen, depth), _picture(v, seen, depth)) for k, v in pairs)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value), tuple(_picture(v, seen, depth) for v in itertools.islice(value, _LONG))
    return type(value).__name__, _picture(getattr(value, "__dict__", None), seen, depth)


def _state_of(value: Any) -> Any:
    """The state of an object that draws random numbers; None for any other."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, torch.Generator):
        return value.get_state()
    return None


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """After the block, Python values in attributes of the model's modules are what they were before.

    Tensors are not looked at.

    >>> layer = nn.Linear(2, 2)
    >>> layer.steps, layer.seen = 0, [1]
    >>> with attributes_kept(layer):
    ...     layer.steps += 1
    ...     layer.seen.append(2)
    >>> layer.steps, layer.seen
    (0, [1])
    """
    seen: dict[int, Callable[[], Any]] = {}
    kept = [
        (module, {k: _keep(v, seen) for k, v in vars(module).items() if _is_value(k, v)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, values in kept:
            for key in [k for k, v in vars(module).items() if _is_value(k, v) and k not in values]:
                del vars(module)[key]
            for key, back in values.items():
                vars(module)[key] = back()


def _is_value(key: str, value: Any) -> bool:
    return key not in _OF_EVERY_MODULE and not isinstance(value, _OPAQUE)


def _keep(value: Any, seen: dict[int, Callable[[], Any]]) -> Callable[[], Any]:
    """What gives the same object back, with the content that it has now."""
    if isinstance(value, (*_PLAIN, *_OPAQUE, float, complex)):
        return lambda: value
    if id(value) not in seen:
        seen[id(value)] = lambda: value  # where it holds itself
        seen[id(value)] = _keep_object(value, seen)
    return seen[id(value)]


def _keep_object(value: Any, seen: dict[int, Callable[[], Any]]) -> Callable[[], Any]:
    if isinstance(value, itertools.count):
        former = copy.copy(value)
        return lambda: copy.copy(former)
    if isinstance(value, (random.Random, np.random.Generator, torch.Generator)):
        return _keep_generator(value)
    if isinstance(value, (list, deque)):
        items = [_keep(item, seen) for item in value]
        return lambda: _refilled(value, [back() for back in items])
    if isinstance(value, set):
        members = set(value)
        return lambda: value if value == members else _refilled(value, members)
    if isinstance(value, dict):
        pairs = {key: _keep(item, seen) for key, item in value.items()}
        return lambda: _refilled(value, {key: back() for key, back in pairs.items()})
    if isinstance(getattr(value, "__dict__", None), dict):
        inner = _keep(vars(value), seen)
        return lambda: (inner(), value)[1]
    return lambda: value


def _refilled(value: Any, items: Any) -> Any:
    """A container with these items. One that has them is left alone: other threads may be reading it."""
    now, then = list(_flat(value)), list(_flat(items))
    if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(items)
    return value


def _flat(items: Any) -> Iterator[Any]:
    for item in items.items() if isinstance(items, dict) else items:
        yield from item if isinstance(items, dict) else (item,)


def _keep_generator(value: Any) -> Callable[[], Any]:
    state = copy.deepcopy(_state_of(value))

    def back() -> Any:
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = state
        elif isinstance(value, random.Random):
            value.setstate(state)
        else:
            value.set_state(state)
        return value

    return back
