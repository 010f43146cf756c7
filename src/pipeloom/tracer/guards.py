"""What a forward does that one trace of it does not show: each is watched for, and refused or worked around.

Attributes by which one call hands Python values to the next, hooks that are called with gradients, changes of
parameters, and running statistics inside activation checkpoints.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from inspect import signature
from numbers import Number
from pathlib import Path
from threading import local
from traceback import walk_tb
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.errors import CaptureError
from ..ir.user_code import at, definition_of, is_user_file, line_of, raised_at, user_line
from .tensors import storage_ids, tensors_of, written_by

T = TypeVar("T")

_log = logging.getLogger("pipeloom")

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
        pictures: dict[tuple[int, str], str] = {}
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

        def watched_getattribute(module: nn.Module, name: str) -> Any:
            if name == _ALL_ATTRIBUTES:  # as torch's own code often does
                if is_user_file(sys._getframe(1).f_code.co_filename) and self._is_watched(module):
                    self._used(module, name).read(_line())
            elif name not in _OF_EVERY_MODULE and name[:2] != "__" and self._is_watched(module):
                self._used(module, name).read(_line())
            return object.__getattribute__(module, name)

        def watched(change: Callable[..., None]) -> Callable[..., None]:
            def changes(module: nn.Module, name: str, *value: Any) -> None:
                if name not in _OF_EVERY_MODULE and self._is_watched(module):
                    self._used(module, name).write(_line())
                change(module, name, *value)

            return changes

        with patch.multiple(
            nn.Module,
            __getattribute__=watched_getattribute,
            __setattr__=watched(nn.Module.__setattr__),
            __delattr__=watched(nn.Module.__delattr__),
        ):
            yield

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


def settled(run: Callable[[T | None], tuple[T, AttributeWatch]], alike: Callable[[T, T], bool]) -> T:
    """What a run of the forward gives; where it hands attributes on, what a second one gives, which gets the
    first: what only the first call sets up, as `config.problem_type`, is settled in the second.

    Raises: CaptureError if the second run hands attributes on, too, or is not like the first.
    """
    result, watch = run(None)
    if (carried := next(watch.carried(), None)) is not None:
        first = result
        result, watch = run(first)
        for later in watch.carried():
            later.refuse()
        if not alike(first, result):
            carried.refuse()
    return result


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


_DEEPEST = 50
"""Objects below so many others are opaque: a picture of them would take too much of Python's stack."""

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
        self._depth = 0

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
        if isinstance(value, _OPAQUE) or self._depth == _DEEPEST:
            return str(type(value).__name__)
        return self._picture_once(value, self._look_inside)

    def _picture_once(self, value: Any, look: Callable[[Any], str]) -> str:
        # The value is held beside its picture: once it is gone, another one could get its id.
        if id(value) not in self._seen:
            self._seen[id(value)] = value, "itself"  # where it holds itself
            self._depth += 1
            self._seen[id(value)] = value, look(value)
            self._depth -= 1
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
        modules stay out: they are not put back, but for buffers that are None."""
        fields = _fields(owner)
        if isinstance(owner, nn.Module):
            fields = {name: item for name, item in fields.items() if not _stays(item)}
            for name in [name for name, buffer in owner._buffers.items() if buffer is None]:
                self._restores.append(partial(setattr, owner, name, None))
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
    # A hash and not the text: a part would else be spelled out in the picture of everything that holds it.
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
        for slots in [vars(kind).get("__slots__", ())]
        for name in ([slots] if isinstance(slots, str) else slots)
        if name in vars(kind)
    }


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


@contextmanager
def caches_kept(model: nn.Module | None = None) -> Iterator[None]:
    """Tensors that the block leaves outside the model, in variables and dictionaries of the user's files or
    in functions with a cache, are forgotten: they have no data. So are those that it puts into attributes and
    buffers of a model: the next trace would take them for the model's own. Installed packages are too many to
    look at.
    """
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    files["__main__"] = files.get("__main__") or "model.py"
    mine = [n for n, f in files.items() if f and "site-packages" not in f and is_user_file(f)]
    spaces = [vars(sys.modules[name]) for name in mine]
    values = [value for space in spaces for value in [*space.values()]]
    owned = [v for kind in values if isinstance(kind, type) and _is_users(kind) for v in vars(kind).values()]
    stores = [*spaces, *(value for value in [*values, *owned] if type(value) is dict)]
    for inner in model.modules() if model is not None else ():
        stores += [vars(inner), inner._buffers]
    before = [(store, dict(store)) for store in stores]
    caches = [getattr(value, "__func__", value) for value in [*values, *owned]]
    misses = [(c, c.cache_info().misses) for c in caches if isinstance(c, functools._lru_cache_wrapper)]
    try:
        yield
    finally:
        for store, then in before:  # other threads may leave real ones there
            for name in [n for n, v in store.items() if v is not then.get(n) and _is_traced(v)]:
                if name in then:
                    store[name] = then[name]
                else:
                    del store[name]
        for cache, count in misses:
            if cache.cache_info().misses > count:
                cache.cache_clear()


def _is_traced(value: Any) -> bool:
    return any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors_of(value))


_ON_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_ON_MODULES = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_ON_ALL_MODULES = {
    "_global_backward_hooks": "register_module_full_backward_hook",
    "_global_backward_pre_hooks": "register_module_full_backward_pre_hook",
}


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A hook that is called with gradients.

    owner: FQN of the parameter or module ("" for the model itself).  registered_by: the function of torch.
    where: file and line of the hook, if it is a Python function.
    """

    owner: str
    registered_by: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.registered_by}{at(self.where)}"


def parameter_hooks(model: nn.Module) -> tuple[Hook, ...]:
    """Hooks on parameters and buffers.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.weight.register_hook(lambda grad: grad * 2)
    >>> [(hook.owner, hook.registered_by) for hook in parameter_hooks(layer)]
    [('weight', 'register_hook')]
    """
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    return _hooks((name, tensor, _ON_PARAMETERS) for name, tensor in named)


def backward_hooks(model: nn.Module) -> tuple[Hook, ...]:
    """Hooks on modules that are called with gradients, those for all modules of the process first."""
    own = ((path, inner, _ON_MODULES) for path, inner in model.named_modules())
    return _hooks(itertools.chain([("", torch_module, _ON_ALL_MODULES)], own))


def _hooks(holders: Iterable[tuple[str, object, Mapping[str, str]]]) -> tuple[Hook, ...]:
    return tuple(
        Hook(owner=owner, registered_by=by, where=definition_of(function))
        for owner, holder, tables in holders
        for table, by in tables.items()
        for function in (getattr(holder, table, None) or {}).values()
    )


def refuse_parameter_hooks(hooks: tuple[Hook, ...], name: str) -> None:
    """Raises: CaptureError if there is any."""
    if hooks:
        raise CaptureError(
            f"{name} has a hook on its parameter {hooks[0].owner}, by {hooks[0]}: a rank sees only parts of "
            "a parameter's gradient, so the hook would not be called as in one process",
            hint="let a torch.autograd.Function in the forward change the gradient, as in "
            "F.linear(x, Scaled.apply(self.weight)), or do it in the optimizer that Job.optimizer returns",
        )


HINT = (
    "change what is trained in the step of the optimizer that Job.optimizer returns; what is not, and has "
    "requires_grad=False, may be changed in place under torch.no_grad(), without .data"
)


@contextmanager
def as_buffers(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """In the block the model's parameters of these names are buffers, under all their names.

    >>> layer = nn.Linear(2, 2)
    >>> with as_buffers(layer, ["bias"]):
    ...     [name for name, _ in layer.named_buffers()], [name for name, _ in layer.named_parameters()]
    (['bias'], ['weight'])
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = {id(named[name]) for name in names}
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()] if chosen else []
    for module, parameters, _ in before:
        for key, tensor in parameters.items():
            if id(tensor) in chosen:
                module._buffers[key] = module._parameters.pop(key)
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            for store, former in ((module._parameters, parameters), (module._buffers, buffers)):
                store.clear()
                store.update(former)  # type: ignore[arg-type]


def refuse_new_tensor(name: str) -> NoReturn:
    """Raises: CaptureError for a parameter in whose place the forward puts another tensor."""
    raise CaptureError(
        f"the forward puts another tensor in the place of the parameter {name}{at(user_line())}", hint=HINT
    )


def refuse_transforms(error: Exception, name: str) -> None:
    """Raises: CaptureError if an error came through torch's own branches and loops, as `torch.cond`, or
    through `torch.func`, which refuses the hooks on saved tensors that stages need."""
    for frame, _ in walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.parent.name == "_higher_order_ops" and frame.f_code.co_name == file.stem:
            what = f"torch's {file.stem}"
            hint = "write an `if` or a loop of Python: the model is then cut between its modules"
            torch.compiler.reset()  # what PyTorch 2.13 keeps of this call makes the next one fail
        elif file.name == "eager_transforms.py":
            what, hint = "a transform of torch.func", "use torch.autograd.grad, in the forward of one module"
        else:
            continue
        raise CaptureError(
            f"the forward of {name} calls {what}{at(raised_at(error))}: no stage can run it", hint=hint
        ) from error


@functools.cache
def warn_once(told: str) -> None:
    """For what each capture finds again: a process may capture a model for its plan, and in each thread."""
    _log.warning("%s", told)


def warn_of_updates(buffers: Sequence[str], name: str) -> None:
    """Of those that the forward changes in evaluation mode."""
    if buffers:
        more = f" and {len(buffers) - 1} more" if buffers[1:] else ""
        warn_once(
            f"the forward of {name} changes {buffers[0]}{more} in evaluation mode, too: a pipeline then "
            "leaves it as it is"
        )


def by_max_norm(model: nn.Module, parameter: str) -> str:
    """Which embedding's max_norm changes a parameter in the forward; "" if none does."""
    weight = model.get_parameter(parameter)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight is weight:
            if module.max_norm is not None:
                return f", by max_norm={module.max_norm:g} of {type(module).__name__} {name}"
    return ""


class ParameterWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the ATen calls of a recorded forward.

    storages: those of parameters now in use -> FQN.  between: whether code between modules runs now.

    changed: FQN -> line that changed it first.  changed_between: those that code between modules changed.
    saved: parameters that a backward needs.
    """

    def __init__(self, storages: Callable[[], Mapping[int, str]], between: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages, self._between = storages, between
        self.changed: dict[str, str] = {}
        self.changed_between: set[str] = set()
        self.saved: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, lambda tensor: tensor), self:
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved |= set(self._names([tensor]))
        return tensor

    def _names(self, tensors: list[Tensor]) -> Iterator[str]:
        storages = self._storages()
        for storage in storage_ids(tensors):
            if (name := storages.get(storage)) is not None:
                yield name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for name in self._names(tensors_of(written_by(func, args, kwargs))):
                self.changed.setdefault(name, user_line())
                if self._between():
                    self.changed_between.add(name)
        return func(*args, **kwargs)

    def refuse(self, readers: Mapping[str, int], model: nn.Module) -> None:
        """Raises: CaptureError for a change of the model that would not be the same as in one process.

        readers: FQN -> how many ops read the parameter.
        """
        for name, line in self.changed.items():
            if name in self.changed_between:
                why = "between modules, where several ranks run the same code"
            elif name in self.saved:
                why = "while the backward of an earlier micro-batch still needs what it was"
            elif readers.get(name, 0) > 1:
                why = "and other modules read it, which may run on another rank"
            else:
                continue
            by, hint = by_max_norm(model, name), HINT
            if by:
                hint = (
                    "leave max_norm out, or shorten rows in the step of the optimizer that Job.optimizer has"
                )
            raise CaptureError(f"the forward changes the parameter {name}{by}{at(line)}, {why}", hint=hint)


class WeightChangesRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises in the block: CaptureError if parameters or buffers change, as where adapters are merged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in named.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            if (name := self._names.get(args[0].untyped_storage()._cdata)) is not None:
                raise CaptureError(
                    f"train() or eval() of the model changes {name}{at(user_line())}, when no rank has all "
                    "weights",
                    hint="compute the same in the forward in either mode, or evaluate in one process",
                )
        return func(*args, **(kwargs or {}))


_here = local()


@contextmanager
def inside_checkpoint() -> Iterator[None]:
    """The block is run again in the backward."""
    before = getattr(_here, "inside", False)
    _here.inside = True
    try:
        yield
    finally:
        _here.inside = before


@contextmanager
def statistics_in_checkpoints_refused(name: str) -> Iterator[None]:
    """Raise CaptureError where a forward updates running statistics inside a checkpoint.

    Other threads must not run models meanwhile.
    """
    batch_norm: Callable[..., Tensor] = functional.batch_norm
    called = signature(batch_norm)
    generator = checkpoint._checkpoint_without_reentrant_generator

    def checked_batch_norm(*args: Any, **kwargs: Any) -> Tensor:
        given = called.bind(*args, **kwargs).arguments
        keeps = given.get("training") and given.get("running_mean") is not None
        if keeps and getattr(_here, "inside", False):
            raise CaptureError(
                f"the forward of {name} updates running statistics inside a checkpoint{at(user_line())}: "
                "PyTorch updates them twice, the second time when it computes again, and a pipeline once",
                hint="switch the model's checkpointing off, and let pipeloom do it: --treatments recompute",
            )
        return batch_norm(*args, **kwargs)

    def watched_generator(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        with inside_checkpoint():
            yield from generator(*args, **kwargs)

    with (
        patch.object(functional, "batch_norm", checked_batch_norm),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", watched_generator),
    ):
        yield
