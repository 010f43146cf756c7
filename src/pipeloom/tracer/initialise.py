"""Build a model without memory, then make only the parameters that a rank owns.

The constructor runs once on fake tensors while every ATen call is recorded. Replaying the record in order
with real tensors gives the values of `torch.manual_seed(seed); model()` bit for bit. Calls that only
matter to tensors nobody asked for are left out; if they draw random numbers they run on a scratch tensor
that is dropped at once, so the generator moves on as if they had run. Peak memory is what was asked for
plus the largest single parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from .once import one_thread

Call = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any], Any]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fakes(tree: object) -> Iterator[FakeTensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, FakeTensor))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every ATen call made under it, with its fake arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


@dataclass(eq=False)
class Blueprint:
    """A model on fake tensors, with what is needed to make any part of it real.

    why_whole: set when the constructor reads tensor values and so cannot run on fake ones: then each
        materialisation builds the whole model.
    """

    build: Callable[[], nn.Module]
    model: nn.Module
    calls: list[Call] = field(default_factory=list)
    why_whole: str = ""

    @one_thread
    def materialise(self, seed: int, wanted: Iterable[str]) -> dict[str, Tensor]:
        """The named parameters and buffers as `torch.manual_seed(seed); build()` makes them.

        wanted: FQNs. Tied names give the same tensor. The generator's state is left as it was.
        """
        named = _named_tensors(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.why_whole:
                whole = self.build()
                real = _named_tensors(whole)
                return {name: real[name].detach() for name in wanted}
            replay = _Replay(self.calls, {_storage(named[name]) for name in wanted})
            replay.run()
            return {name: replay.real(named[name]).detach() for name in wanted}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return params | dict(model.named_buffers(remove_duplicate=False))


def blueprint(build: Callable[[], nn.Module], fake: FakeTensorMode) -> Blueprint:
    """Run a constructor on fake tensors of `fake`, recording it.

    A constructor that reads values of tensors (`.item()`, `.tolist()`) is run for real instead, and its
    result turned into fake tensors.
    """
    recorder = _Recorder()
    try:
        with torch.random.fork_rng(devices=[]), fake, recorder:
            model = build()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        model = _imitate(build(), fake)
        return Blueprint(build, model, why_whole=f"{type(error).__name__}: {error}")
    if any(not isinstance(p, FakeTensor) for p in [*model.parameters(), *model.buffers()]):
        return Blueprint(build, _imitate(model, fake), why_whole="it returns tensors made elsewhere")
    return Blueprint(build, model, recorder.calls)


def _imitate(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Replace every parameter and buffer by a fake one, keeping ties."""
    seen: dict[int, Any] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    if id(tensor) not in seen:
                        seen[id(tensor)] = (tensor, fake.from_tensor(tensor))
                    store[name] = seen[id(tensor)][1]
    return model


class _Replay:
    """Runs recorded calls on real tensors, as far as some storages need them."""

    def __init__(self, calls: list[Call], wanted: set[int]) -> None:
        self.calls = calls
        self.wanted = wanted
        self.needed = self._close()
        self.tensors: dict[int, Tensor] = {}
        self.by_storage: dict[int, Tensor] = {}
        self.members: dict[int, list[int]] = {}

    def _close(self) -> set[int]:
        """All storages whose content flows into a wanted one."""
        needed = set(self.wanted)
        for _, args, kwargs, result in reversed(self.calls):
            touched = {_storage(t) for t in _fakes((args, kwargs, result))}
            if touched & needed:
                needed |= touched
        return needed

    def run(self) -> None:
        last = {_storage(t): index for index, call in enumerate(self.calls) for t in _fakes(call[1:])}
        with torch.no_grad():
            for index, (func, args, kwargs, result) in enumerate(self.calls):
                touched = {_storage(t) for t in _fakes((args, kwargs, result))}
                if touched & self.needed:
                    made = func(*tree_map(self.real, args), **tree_map(self.real, kwargs))
                    self._remember(result, made)
                    self._forget({s for s in touched - self.wanted if last[s] == index})
                elif torch.Tag.nondeterministic_seeded in func.tags:
                    func(*tree_map(_scratch, args), **tree_map(_scratch, kwargs))

    def _remember(self, fakes: Any, made: Any) -> None:
        for fake, tensor in zip(tree_iter(fakes), tree_iter(made), strict=True):
            if isinstance(fake, FakeTensor):
                self.tensors[id(fake)] = tensor
                self.members.setdefault(_storage(fake), []).append(id(fake))
                self.by_storage.setdefault(_storage(fake), tensor)

    def _forget(self, storages: set[int]) -> None:
        for storage in storages:
            self.by_storage.pop(storage, None)
            for key in self.members.pop(storage, ()):
                self.tensors.pop(key, None)

    def real(self, leaf: Any) -> Any:
        """The real tensor of a fake one; anything else as it is.

        A parameter is another Python object than the tensor it wraps: it is found by the storage, shape
        and strides it shows.
        """
        if not isinstance(leaf, FakeTensor):
            return leaf.clone() if isinstance(leaf, Tensor) else leaf
        if id(leaf) not in self.tensors:
            base = self.by_storage[_storage(leaf)]
            self.tensors[id(leaf)] = base.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            self.members.setdefault(_storage(leaf), []).append(id(leaf))
        return self.tensors[id(leaf)]


def _scratch(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
