"""Python values in attributes of modules: which of them a forward carries from one call to the next.

A graph is traced from one call, and code between modules runs on several ranks: neither sees what an earlier
call has left, such as a counter of steps. So while a forward is traced, reads and writes of attributes are
watched, and values are compared with what they were before. Attributes of classes count as well: a module
reads a default there until it has a value of its own.
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
from functools import partial
from hashlib import sha256
from numbers import Number
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..ir.errors import CaptureError
from .user_code import at, definition_of, is_user_file, line_of, user_line

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ALL_ATTRIBUTES = "__dict__"
_TENSOR = "a tensor"
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

    @property
    def hands_on(self) -> bool:
        """Whether a call may have used what an earlier one has left."""
        return not self.writes or (self.read_first and bool(self.reads | self.since))


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
    """Watches a model's modules in `watching`. `carried` says what was seen.

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

    def _pictures(self) -> dict[tuple[int, str], str]:
        """What each module, and each class of modules, has under each name."""
        snapshot = Snapshot()
        pictures = {}
        for module in self.modules.values():
            values: dict[str, Any] = {}
            for kind in reversed(_classes(module)):
                values |= _fields(kind)
                pictures |= {(id(kind), k): snapshot.picture(v) for k, v in _fields(kind).items()}
            values |= _fields(module)
            pictures |= {(id(module), k): snapshot.picture(v) for k, v in values.items()}
        return pictures

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Other threads must not call modules meanwhile."""
        set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__

        def watched_getattribute(module: nn.Module, name: str) -> Any:
            if name == _ALL_ATTRIBUTES:  # as torch's own code often does
                if is_user_file(sys._getframe(1).f_code.co_filename) and self._is_watched(module):
                    self._used(module, name).read(_line())
            elif name not in _OF_EVERY_MODULE and name[:2] != "__" and self._is_watched(module):
                self._used(module, name).read(_line())
            return object.__getattribute__(module, name)

        def watched_setattr(module: nn.Module, name: str, value: Any) -> None:
            if name not in _OF_EVERY_MODULE and self._is_watched(module):
                self._used(module, name).write(_line())
            set_attribute(module, name, value)

        def watched_delattr(module: nn.Module, name: str) -> None:
            if name not in _OF_EVERY_MODULE and self._is_watched(module):
                self._used(module, name).write(_line())
            delete_attribute(module, name)

        watched = {"__getattribute__": watched_getattribute, "__setattr__": watched_setattr}
        for name, function in (watched | {"__delattr__": watched_delattr}).items():
            type.__setattr__(nn.Module, name, function)
        try:
            yield
        finally:
            type.__setattr__(nn.Module, "__setattr__", set_attribute)
            type.__setattr__(nn.Module, "__delattr__", delete_attribute)
            type.__delattr__(nn.Module, "__getattribute__")

    def _used(self, module: nn.Module, name: str) -> _Uses:
        return self._uses.setdefault((id(module), name), _Uses())

    def _is_watched(self, module: nn.Module) -> bool:
        path = self._paths.get(id(module))
        return path is not None and not (path in self._units and self._inside())

    def look(self) -> None:
        """The forward has ended. Called in time: torch.export puts attributes back."""
        self._now = self._pictures()

    def carried(self) -> Iterator[CarriedAttribute]:
        """Attributes that were changed, and whose former value was used.

        What only adds to itself, as a counter that nothing looks at, is not among them; nor is a tensor. What
        is changed on a class is: reads of it cannot be watched.
        """
        before, now = self._before, self._now
        changed = [key for key in before | now if before.get(key, _ABSENT) != now.get(key, _ABSENT)]
        for path, module in self.modules.items():
            kinds = {id(kind) for kind in _classes(module)}
            looked_at = self._uses.get((id(module), _ALL_ATTRIBUTES))
            for owner, key in changed:
                uses = self._uses.get((id(module), key))
                if owner in kinds:
                    hands_on = True
                elif owner != id(module) or now.get((owner, key)) == _TENSOR:
                    continue
                else:
                    hands_on = looked_at is not None or (uses is not None and uses.hands_on)
                uses = uses or _Uses()
                reads = uses.reads | uses.since
                if hands_on:
                    yield CarriedAttribute(
                        module=path,
                        kind=type(module).__name__,
                        attribute=key,
                        where=min(uses.writes, default=definition_of(type(module))),
                        read_at=min(reads, default="") if path in self._units else "",
                    )


def is_below(path: str, unit: str) -> bool:
    """Whether a module is a unit or inside it.

    >>> is_below("blocks.1.norm", "blocks.1"), is_below("blocks.10", "blocks.1"), is_below("blocks.1", "")
    (True, False, True)
    """
    return not unit or path == unit or path.startswith(f"{unit}.")


def _line() -> str:
    """The line that uses an attribute."""
    frame = sys._getframe(2)
    return user_line(frame) or line_of(frame)


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
    put_back = keep_attributes(model)
    try:
        yield
    finally:
        put_back()


def keep_attributes(model: nn.Module) -> Callable[[], None]:
    """What puts Python values in attributes of the model's modules back to what they are now."""
    snapshot = Snapshot()
    for module in model.modules():
        snapshot.look_at(module)
    return snapshot.put_back


_ATOMS = (str, bytes, type(None), Number, np.generic)
_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device)

_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda generator: copy.deepcopy(generator.bit_generator.state),
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
}
"""Objects that draw random numbers -> what gets their state, and what sets it."""


class Snapshot:
    """Values, with all that they hold, as they are when they are looked at: to compare, and to put back."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, str]] = {}
        self._counts: dict[int, Any] = {}
        self._restores: list[Callable[[], None]] = []

    def put_back(self) -> None:
        """Give each object that was looked at the content again that it had."""
        for restore in self._restores:
            restore()

    def picture(self, value: Any) -> str:
        """Text that is equal for equal content."""
        if isinstance(value, Tensor):
            return _TENSOR
        if isinstance(value, _ATOMS):
            return repr(value)
        if isinstance(value, _OPAQUE):
            return type(value).__name__
        return self._picture_once(value, self._look_inside)

    def _picture_once(self, value: Any, look: Callable[[Any], str]) -> str:
        if id(value) not in self._seen:
            self._seen[id(value)] = value, "itself"  # where it holds itself
            self._seen[id(value)] = value, look(value)
        return self._seen[id(value)][1]

    def _look_inside(self, value: Any) -> str:
        for kind, (get, put) in _STATES.items():
            if isinstance(value, kind):
                state = get(value)
                self._restores.append(partial(put, value, state))
                return repr(state.tolist() if isinstance(state, Tensor) else state)
        if isinstance(value, itertools.count):
            self._counts[id(value)] = copy.copy(value)
            return repr(value)
        if isinstance(value, np.ndarray):
            return f"{value.shape} {value!r}"
        if isinstance(value, dict):
            self._restores.append(partial(self._refill, value, dict(value)))
            return _digest(*((self.picture(key), self.picture(item)) for key, item in value.items()))
        if isinstance(value, (list, deque)):
            self._restores.append(partial(self._refill, value, list(value)))
        if isinstance(value, (list, deque, tuple)):
            return _digest(*map(self.picture, value))
        if isinstance(value, set):
            self._restores.append(partial(self._refill, value, set(value)))
        if isinstance(value, (set, frozenset)):
            return _digest(*sorted(map(self.picture, value)))
        return self.look_at(value)

    def look_at(self, owner: Any) -> str:
        """The picture of an object's attributes and of those of its classes. Of a module its tensors and
        modules stay out: they are not put back."""
        fields = _fields(owner)
        if isinstance(owner, nn.Module):
            fields = {name: item for name, item in fields.items() if not _stays(item)}
        self._restores.append(partial(self._put_fields, owner, fields))
        kinds = [] if isinstance(owner, type) else _classes(owner)
        return _digest(
            type(owner).__name__,
            *((name, self.picture(item)) for name, item in fields.items()),
            *(self._picture_once(kind, self.look_at) for kind in kinds),
        )

    def _again(self, item: Any) -> Any:
        return copy.copy(self._counts[id(item)]) if id(item) in self._counts else item

    def _refill(self, value: Any, items: Any) -> None:
        """A container that has its items is left alone: other threads may be reading it."""
        if isinstance(items, dict):
            items = {key: self._again(item) for key, item in items.items()}
        else:
            items = type(items)(map(self._again, items))
        now, then = list(_flat(value)), list(_flat(items))
        if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(items)

    def _put_fields(self, owner: Any, then: Mapping[str, Any]) -> None:
        now = _fields(owner)
        for name in now.keys() - then.keys():
            if not (isinstance(owner, nn.Module) and _stays(now[name])):
                _delete(owner, name)
        for name, item in then.items():
            if name not in now or now[name] is not self._again(item):
                _put(owner, name, self._again(item))


def _stays(value: Any) -> bool:
    return isinstance(value, (Tensor, *_OPAQUE))


def _flat(items: Any) -> Iterator[Any]:
    for item in items.items() if isinstance(items, dict) else items:
        yield from item if isinstance(items, dict) else (item,)


def _digest(*parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()


def _classes(value: Any) -> list[type]:
    """The user's own classes of an object, its own first."""
    return [kind for kind in type(value).__mro__ if _is_users(kind)]


def _is_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ != "builtins" and is_user_file(getattr(module, "__file__", None) or "model.py")


def _slots(owner: Any) -> dict[str, Any]:
    """Name -> descriptor, of attributes that an object keeps outside its dictionary."""
    return {
        name: vars(kind)[name]
        for kind in reversed(_classes(owner))
        for name in _names(vars(kind).get("__slots__", ()))
        if name in vars(kind)
    }


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _fields(owner: Any) -> dict[str, Any]:
    """Values in attributes of a module, a class or any other object itself."""
    held = getattr(owner, "__dict__", {})
    if isinstance(owner, type):
        return {
            name: value
            for name, value in held.items()
            if name[:2] != "__" and not hasattr(type(value), "__get__") and not isinstance(value, _OPAQUE)
        }
    slots = {name: slot.__get__(owner) for name, slot in _slots(owner).items() if hasattr(owner, name)}
    if isinstance(owner, nn.Module):
        held = {name: value for name, value in held.items() if name not in _OF_EVERY_MODULE}
    return held | slots


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        type.__setattr__(owner, name, value)
    elif name in _slots(owner):
        _slots(owner)[name].__set__(owner, value)
    else:
        vars(owner)[name] = value


def _delete(owner: Any, name: str) -> None:
    if isinstance(owner, type):
        type.__delattr__(owner, name)
    elif name in _slots(owner):
        _slots(owner)[name].__delete__(owner)
    else:
        del vars(owner)[name]
