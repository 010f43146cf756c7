"""The user's model without data: parameters are put in for a run and taken out again.

The model is the blueprint's, on fake tensors, so that modules of other stages take no memory. The forward
of each unit is replaced by one that calls a hook: that of the running `InterceptedForward`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..blueprint import Blueprint
from ..guards import backward_hooks

_INTERNAL = frozenset(vars(nn.Module()))


class Location(NamedTuple):
    """Where a module keeps a tensor. store: a dict or list of it.  key: what it stands under there."""

    module: nn.Module
    store: Any
    key: Any


@dataclass(eq=False)
class ModuleUnit:
    """A module that is never cut.

    original_forward: its own forward, or that one compiled.  attribute: where the skeleton puts its function.
    A module with hooks that are called with gradients is called with them, by `_call_impl`: tensors
    between modules have no gradients to call them with.
    """

    fqn: str
    module: nn.Module
    original_forward: Callable[..., Any]
    compiled: bool = False
    attribute: str = "forward"


UnitHook = Callable[[ModuleUnit, tuple[Any, ...], dict[str, Any]], Any]
"""(unit, args, kwargs) -> what the unit's forward is to return."""


class Skeleton:
    """A model whose tensors come and go.

    names: canonical FQN of each parameter, buffer and plain tensor attribute -> where the model keeps it.
    constants: plain tensor attributes that are real already.
    with_hooks: modules with hooks that are called with gradients: what they hold is not cut.
    intercept: what happens when a unit is called while a run of the forward is on; None if none is.
    rerun: what happens when one is called without a run: activation checkpointing calls units a second time
        in the backward. None: they just run.
    ranks: of the stages, where those of several share this skeleton, as they do not in a run. Each rank's
        attributes have Python values of their own: `left` gives them those that its stages have left.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self.model = blueprint.model
        self.names: dict[str, list[Location]] = {}
        self.constants: dict[str, Tensor] = {}
        self.params = tuple(dict(self.model.named_parameters()))
        self.with_hooks = frozenset(hook.owner for hook in backward_hooks(self.model))
        self.units: dict[str, ModuleUnit] = {}
        self.intercept: UnitHook | None = None
        self.rerun: UnitHook | None = None
        self.ranks: Sequence[int] = ()
        self.left: dict[int, Callable[[], None]] = {}
        self._canonical: dict[int, str] = {}
        self._resting: dict[str, Tensor] = {}
        self._below: dict[str, tuple[str, ...]] = {}
        for path, module in self.model.named_modules():
            prefix = f"{path}." if path else ""
            for store in (module._parameters, module._buffers):
                for key, tensor in store.items():
                    if tensor is not None:
                        self._add(prefix + key, tensor, Location(module, store, key))
        for path, module in self.model.named_modules():
            for name, tensor, location in _attributes(module, f"{path}." if path else ""):
                self._add(name, tensor, location)
        registered = {*self.params, *dict(self.model.named_buffers())}
        self.attributes = tuple(name for name in self.names if name not in registered)
        for name in self.attributes:
            if isinstance(self._resting[name], FakeTensor):
                blueprint.attribute_tensors[name] = self._resting[name]
            else:
                self.constants[name] = self._resting[name]

    def _add(self, name: str, tensor: Tensor, location: Location) -> None:
        name = self._canonical.setdefault(id(tensor), name)
        self.names.setdefault(name, []).append(location)
        self._resting[name] = tensor

    def resting(self, name: str) -> Tensor:
        """What stands for a parameter or buffer while no run has put data in: its shape and dtype."""
        return self._resting[name]

    def name_of(self, tensor: Tensor) -> str | None:
        return self._canonical.get(id(tensor))

    def current(self, name: str) -> Tensor:
        """What the model holds now under a name."""
        _, store, key = self.names[name][0]
        tensor: Tensor = store[key]
        return tensor

    def below(self, fqn: str) -> tuple[str, ...]:
        """Names of all parameters, buffers and attributes in a module, tied ones under their first name."""
        if fqn not in self._below:
            inside = {id(module) for module in self.model.get_submodule(fqn).modules()}
            self._below[fqn] = tuple(
                name
                for name, locations in self.names.items()
                if any(id(location.module) in inside for location in locations)
            )
        return self._below[fqn]

    @contextmanager
    def using(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """Put tensors into the model; afterwards those that rest there are back."""
        for name, tensor in state.items():
            for _, store, key in self.names[name]:
                store[key] = tensor
        try:
            yield
        finally:
            self.rest(state)

    def rest(self, names: Iterable[str] | None = None) -> None:
        """Put back the tensors that rest here: all, or those named."""
        for name in self.names if names is None else names:
            for _, store, key in self.names[name]:
                store[key] = self._resting[name]

    def install(self, fqns: Iterable[str]) -> None:
        """Make these modules, and no others, the units."""
        for unit in self.units.values():
            delattr(unit.module, unit.attribute)
        self.units = {}
        for fqn in fqns:
            module = self.model.get_submodule(fqn)
            attribute = "_call_impl" if fqn in self.with_hooks else "forward"
            unit = ModuleUnit(fqn, module, getattr(module, attribute), attribute=attribute)
            self.units[fqn] = unit
            setattr(module, attribute, self._hooked_forward(unit))

    def _hooked_forward(self, unit: ModuleUnit) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.intercept is not None:
                return self.intercept(unit, args, kwargs)
            if self.rerun is not None:
                return self.rerun(unit, args, kwargs)
            return unit.original_forward(*args, **kwargs)

        return forward

    def compile_units(self, eager: Container[str]) -> None:
        """Pass the forward of each unit through torch.compile, but for those named."""
        for unit in self.units.values():
            if not unit.compiled and unit.fqn not in eager and unit.attribute == "forward":
                unit.original_forward = torch.compile(unit.original_forward, dynamic=False)
                unit.compiled = True


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, Location]]:
    """Tensors that a module keeps as plain attributes, alone or in a list or dict."""
    store: MutableMapping[str, Any] = vars(module)
    for key, value in list(store.items()):
        if key in _INTERNAL:
            continue
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value, Location(module, store, key)
        elif isinstance(value, (list, dict)):
            for k, t in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(t, Tensor):
                    yield f"{prefix}{key}.{k}", t, Location(module, value, k)


def initial_state(skeleton: Skeleton, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Parameters, buffers and tensor attributes by FQN, as the model initialises them with seed 0."""
    names = list(names)
    constants: Mapping[str, Tensor] = skeleton.constants
    state = skeleton.blueprint.materialise(0, [name for name in names if name not in constants])
    state |= {name: constants[name] for name in names if name in constants}
    return {name: tensor.to(device) for name, tensor in state.items()}


class TrialParameters:
    """Initial parameters and buffers for a run of the whole model, of which a few modules are in memory.

    device: where they are to be.  fake: hand out the fake tensors of the skeleton instead.
    limit_bytes: how much is made in one go. More at once is faster, as each go runs through the whole
        constructor.
    """

    def __init__(
        self, skeleton: Skeleton, device: torch.device, *, fake: bool = False, limit_bytes: int = 2**30
    ) -> None:
        self.skeleton = skeleton
        self.device = device
        self.fake = fake
        self.limit_bytes = limit_bytes
        self._order = list(skeleton.names)
        self._loaded: dict[str, Tensor] = {}
        self._pinned: dict[str, Tensor] = {}
        self._storages: dict[int, str] = {}

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors for one call: parameters are leaves, buffers may be changed."""
        names = list(names)
        if self.fake:
            return {name: self._leaf(name, self.skeleton.resting(name)) for name in names}
        if any(name not in self._loaded for name in names):
            self._loaded = self._load(names)
            real = (self._loaded | self._pinned).items()
            self._storages = {t.untyped_storage()._cdata: n for n, t in real if n in self.skeleton.params}
        return {name: self._leaf(name, self._loaded[name]) for name in names}

    def storages(self) -> dict[int, str]:
        """Storages of the parameters that are in memory -> FQN."""
        if self.fake and not self._storages:
            self._storages = {
                self.skeleton.resting(n).untyped_storage()._cdata: n for n in self.skeleton.params
            }
        return self._storages

    def pinned(self, name: str) -> Tensor:
        """The same tensor every time."""
        if name not in self._pinned:
            self._pinned[name] = self.state([name])[name]
        return self._pinned[name]

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.skeleton.params:
            return nn.Parameter(tensor, self.skeleton.resting(name).requires_grad)
        return tensor.clone()

    def _load(self, names: list[str]) -> dict[str, Tensor]:
        """What is asked for, and what is registered next, as far as the limit goes."""
        size, chosen = 0, list(names)
        last = max(self._order.index(name) for name in names)
        following = [n for n in self._order[last + 1 :] if n not in chosen]
        builds_whole = bool(self.skeleton.blueprint.why_whole)
        if builds_whole:
            following = [n for n in self._order if n not in chosen]
        for name in following:
            size += self.skeleton.resting(name).nbytes
            if size > self.limit_bytes and not builds_whole:
                break
            chosen.append(name)
        return initial_state(self.skeleton, chosen, self.device)
