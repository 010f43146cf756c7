"""Build a model without memory, then make only the parameters that a rank owns.

The constructor runs once on fake tensors while every ATen call is recorded. Replaying the record in order
with real tensors gives the values of `torch.manual_seed(seed); model()` bit for bit. Calls that only
matter to tensors nobody asked for are left out; if they draw random numbers they run on a scratch tensor
that is dropped at once, so the generator moves on as if they had run. Peak memory is what was asked for
plus the largest single parameter and its initialiser's scratch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from ..ir.errors import CaptureError, of_type
from ..ir.user_code import at, call_own, user_line
from .guards import Hook, caches_kept, parameter_hooks
from .random import constructor_draws, one_thread_at_a_time
from .shared_memory import plain_attributes, refuse_shared_memory
from .tensors import StorageView, tensors_of, written_by


class GeneratorUse(NamedTuple):
    """A generator in the arguments of a call, by its number; 0 is the default one."""

    generator: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedCall:
    """One ATen call, or one call of an initialiser that looks at what it draws. Tensors are Views,
    generators Draws.

    writes: storages that it makes or changes.  reads: all others that it is given.
    random: it draws numbers.  blind: how many does not depend on values that it is given.
    seeds: generators that were seeded since the call before, with their states.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any
    writes: frozenset[int]
    reads: frozenset[int]
    random: bool = False
    blind: bool = True
    seeds: tuple[tuple[int, Tensor], ...] = ()


@dataclass(eq=False)
class ConstructorRecord:
    """All calls in order, and what keeps the numbers of storages unique."""

    calls: list[RecordedCall] = field(default_factory=list)
    alive: dict[int, object] = field(default_factory=dict)


def _is_leaf(value: object) -> bool:
    return isinstance(value, (StorageView, GeneratorUse))


def _leaves(tree: object) -> Iterable[Any]:
    return tree_iter(tree, is_leaf=_is_leaf)


def _storages(tree: object) -> frozenset[int]:
    return frozenset(leaf.storage for leaf in _leaves(tree) if isinstance(leaf, StorageView))


def _blind(function: torch._ops.OpOverload, arguments: Any) -> bool:
    """Whether how much a call draws is known without the values of the tensors among its arguments."""
    name = str(function.overloadpacket).split(".")[-1]
    tensors = sum(isinstance(leaf, StorageView) for leaf in _leaves(arguments))
    return not tensors or (tensors == 1 and name.endswith(("_", "_like")))


def _on_meta(*trees: Any) -> bool:
    """Whether a call is for shapes only, as the constructor put it on the meta device itself: no generator
    moves on there."""
    return any(isinstance(leaf, Tensor) and leaf.device.type == "meta" for leaf in tree_iter(trees))


class ConstructorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every ATen call made under it.

    Fake calls draw nothing, so each one that should is followed by a real draw of one number: a generator
    whose state is not what that left has been seeded by the constructor.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.record = ConstructorRecord()
        self.generators: list[torch.Generator] = [torch.default_generator]
        self.states: dict[int, Tensor] = {0: torch.default_generator.get_state()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = tree_map(self._describe, (args, kwargs))
        value = func(*args, **kwargs)
        result = tree_map(self._describe, value)
        reads = _storages(arguments)
        writes = _storages(written_by(func, *arguments)) | (_storages(result) - reads)
        random = torch.Tag.nondeterministic_seeded in func.tags and not _on_meta(args, kwargs, value)
        self.record.calls.append(
            RecordedCall(
                function=func,
                arguments=arguments,
                result=result,
                writes=writes,
                reads=reads - writes,
                random=random,
                blind=_blind(func, arguments),
                seeds=tuple(self._seeded(arguments)) if random else (),
            )
        )
        # `module.to(dtype)` swaps fake parameters, and refuses while the mode's memo has weak references
        self.fake.fake_tensor_converter.tensor_memo.clear()
        return value

    @contextmanager
    def whole_initialisers(self) -> Iterator[None]:
        """Record `trunc_normal_` as one call: it draws again until all values are within its bounds."""
        original = nn.init._no_grad_trunc_normal_

        def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return original(tensor, *args, **kwargs)
            if _on_meta(tensor):
                return tensor
            arguments = tree_map(self._describe, ((tensor, *args), kwargs))
            self.record.calls.append(
                RecordedCall(
                    function=original,
                    arguments=arguments,
                    result=arguments[0][0],
                    writes=_storages(arguments),
                    reads=frozenset(),
                    random=True,
                    seeds=tuple(self._seeded(arguments)),
                )
            )
            return tensor

        with patch.object(nn.init, "_no_grad_trunc_normal_", recorded):
            yield

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            view = StorageView.of(leaf)
            self.record.alive.setdefault(view.storage, leaf.untyped_storage())
            return view
        if isinstance(leaf, torch.UntypedStorage):  # under a fake mode `torch.load` gives shapes alone
            raise NotImplementedError("the constructor loads tensors")
        if isinstance(leaf, torch.Generator):
            if not any(leaf is generator for generator in self.generators):
                self.generators.append(leaf)
            return GeneratorUse(next(i for i, generator in enumerate(self.generators) if leaf is generator))
        if isinstance(leaf, Tensor):
            with _disable_current_modes():
                return leaf.clone()
        return leaf

    def _seeded(self, arguments: Any) -> Iterator[tuple[int, Tensor]]:
        used = {leaf.generator for leaf in _leaves(arguments) if isinstance(leaf, GeneratorUse)} or {0}
        with _disable_current_modes():  # states are real tensors
            for number in used:
                generator = self.generators[number]
                state = generator.get_state()
                if number not in self.states or not torch.equal(state, self.states[number]):
                    yield number, state
                torch.rand(1, generator=generator)
                self.states[number] = generator.get_state()


class ConstructorReplay:
    """Runs recorded calls on real tensors, as far as some tensors need them."""

    def __init__(self, record: ConstructorRecord, targets: Mapping[str, Tensor]) -> None:
        self.calls = record.calls
        self.targets = {name: StorageView.of(tensor) for name, tensor in targets.items()}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.generators: dict[int, torch.Generator] = {0: torch.default_generator}
        self.real: dict[StorageView, Tensor] = {}
        self._scratch_memory = torch.empty(0).untyped_storage()

    def run(self) -> dict[str, Tensor]:
        """The target tensors by name; names of one tensor get the same object."""
        kept = {view.storage for view in self.targets.values()}
        chosen = self._chosen(kept)
        last = {storage: index for index in sorted(chosen) for storage in self._touched(index)}
        with torch.no_grad():
            for index, call in enumerate(self.calls):
                for number, state in call.seeds:
                    self._generator(number).set_state(state)
                if index in chosen:
                    self._remember(call.result, self._run(call, self._make))
                    self._forget(s for s in self._touched(index) - kept if last[s] == index)
                elif call.random:
                    self._run(call, self._scratch)
        return {name: self._make(view) for name, view in self.targets.items()}

    def _chosen(self, kept: set[int]) -> set[int]:
        """Indices of the calls whose effect can be seen in the target tensors or in the generators."""
        needed = set(kept)
        chosen = set()
        for index in reversed(range(len(self.calls))):
            call = self.calls[index]
            if call.writes & needed or (call.random and not call.blind):
                chosen.add(index)
                needed |= call.writes | call.reads
        return chosen

    def _touched(self, index: int) -> frozenset[int]:
        return self.calls[index].writes | self.calls[index].reads

    def _run(self, call: RecordedCall, stand_in: Callable[[Any], Any]) -> Any:
        args, kwargs = tree_map(stand_in, call.arguments, is_leaf=_is_leaf)
        return call.function(*args, **kwargs)

    def _make(self, leaf: Any) -> Any:
        """The real tensor that a View stands for; anything else as it is."""
        if isinstance(leaf, StorageView):
            if leaf not in self.real:
                self.real[leaf] = leaf.on(self.storages[leaf.storage])
            return self.real[leaf]
        if isinstance(leaf, GeneratorUse):
            return self._generator(leaf.generator)
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    def _scratch(self, leaf: Any) -> Any:
        """A tensor that a call may fill for the generator's sake: all of them share one memory, as fresh
        pages take longer to get than to fill."""
        if not isinstance(leaf, StorageView):
            return self._make(leaf)
        last = sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride, strict=True))
        needed = max(0, last + 1) * leaf.dtype.itemsize
        if self._scratch_memory.nbytes() < needed:
            self._scratch_memory = torch.empty(needed, dtype=torch.uint8).untyped_storage()
        return leaf._replace(offset=0).on(self._scratch_memory)

    def _generator(self, number: int) -> torch.Generator:
        return self.generators.setdefault(number, torch.Generator())

    def _remember(self, views: Any, result: Any) -> None:
        pairs = zip(_leaves(views), tree_iter(result), strict=True)
        for view, tensor in pairs:
            if isinstance(view, StorageView):
                self.storages.setdefault(view.storage, tensor.untyped_storage())

    def _forget(self, storages: Iterable[int]) -> None:
        gone = set(storages)
        for storage in gone:
            self.storages.pop(storage, None)
        for view in [v for v in self.real if v.storage in gone]:
            del self.real[view]


# `copy.deepcopy` of fake tensors, as constructors use it to repeat a layer.
#
# PyTorch copies the FakeTensorMode along with each fake tensor, parameters included (pytorch/pytorch#104465),
# and with the mode its table of weak references to storages, whose count the copy does not raise. Each of
# them is then given back twice: the heap is damaged, and the process dies later, anywhere.


class FakeDeepCopy(TorchFunctionMode):
    """Copies a fake tensor as PyTorch copies a real one, by calls that can be recorded.

    Raises inside `copy.deepcopy`: NotImplementedError for a fake tensor that has a gradient or a history.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode() as fake, FakeDeepCopy():
    ...     twin = copy.deepcopy(torch.nn.BatchNorm1d(4))
    >>> twin.running_mean.fake_mode is fake
    True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _copied(*args)
        return func(*args, **(kwargs or {}))


def _copied(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """The copy of a fake tensor; memo: what this `copy.deepcopy` has copied so far."""
    if id(tensor) not in memo:
        if tensor.grad is not None or not tensor.is_leaf:
            raise NotImplementedError("a tensor with a gradient or a history is copied")
        with torch.no_grad():
            if isinstance(tensor, nn.Parameter):  # one by one, and without what was attached to them
                memo[id(tensor)] = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
            else:
                memo[id(tensor)] = _plain(tensor, memo)
    copied: Tensor = memo[id(tensor)]
    return copied


def _plain(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Other tensors are copied with their whole storage, once: copies share memory where the originals do."""
    storage = tensor.untyped_storage()
    key = ("storage", storage._cdata, tensor.dtype)
    if key not in memo:
        whole = (storage.nbytes() // tensor.itemsize,)
        memo[key] = tensor.detach().as_strided(whole, (1,), 0).clone()
    view = memo[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    copied: Tensor = view.detach().requires_grad_(tensor.requires_grad)
    attached = {name: value for name, value in vars(tensor).items() if name not in vars(copied)}
    vars(copied).update(copy.deepcopy(attached, memo))
    return copied


@dataclass(eq=False)
class Blueprint:
    """A model on fake tensors, with what is needed to make any part of it real.

    attribute_tensors: tensors that the model holds and that are neither parameters nor buffers, by name.
    why_whole: set when the constructor reads or loads tensor values and so cannot run on fake ones: then each
        materialisation builds the whole model.
    changed_parameters: names of parameters that nothing trains and the forward changes: buffers to a graph.
    hooks: on parameters, as the constructor left them.
    """

    build: Callable[[], nn.Module]
    model: nn.Module
    record: ConstructorRecord = field(default_factory=ConstructorRecord)
    attribute_tensors: dict[str, Tensor] = field(default_factory=dict)
    why_whole: str = ""
    hooks: tuple[Hook, ...] = ()
    changed_parameters: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Keep what the constructor made: a forward may put other tensors in the place of buffers, and may
        move its modules, as by `self.layer.to(x.device)`."""
        self.initial = _named_tensors(self.model)
        for module in self.model.modules():
            vars(module)["_apply"] = _Stays(module)

    @one_thread_at_a_time
    def materialise(self, seed: int, names: Iterable[str]) -> dict[str, Tensor]:
        """The named parameters and buffers as `torch.manual_seed(seed); build()` makes them.

        names: FQNs, or names in `attribute_tensors`. Tied names give the same tensor.
        The generator's state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.why_whole:
                with constructor_draws():
                    real = _named_tensors(self.build())
                return {name: real[name].detach() for name in names}
            named: Mapping[str, Tensor] = _named_tensors(self.model) | self.initial | self.attribute_tensors
            return ConstructorReplay(self.record, {name: named[name] for name in names}).run()


@dataclass(repr=False, eq=False)
class _Stays:
    """In the place of a module's `_apply`, which is how it moves: its rank has chosen the device, and what a
    tensor has is in no module now. (No method of the module, as some modules show what lies in `__dict__`.)

    Raises: CaptureError if a dtype would change.
    """

    module: nn.Module

    def __call__(self, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in _named_tensors(self.module).items():
            dtype = convert(torch.empty(0, dtype=tensor.dtype)).dtype
            if dtype != tensor.dtype:
                raise CaptureError(
                    f"the forward converts {name} of {type(self.module).__name__} from {tensor.dtype} to "
                    f"{dtype}{at(user_line())}",
                    hint="convert it where the model is made",
                )
        return self.module


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return params | dict(model.named_buffers(remove_duplicate=False))


def make_blueprint(build: Callable[[], nn.Module], fake: FakeTensorMode) -> Blueprint:
    """Run a constructor on fake tensors of `fake`, recording it.

    A constructor that reads values of tensors (`.item()`, `.tolist()`), or loads them from a file, is run for
    real instead, and its result turned into fake tensors.
    """
    if isinstance(build, nn.Module):
        raise CaptureError(
            f"Job.model is {of_type(build)}, and should be a function that makes one",
            hint="give its class, or lambda: Net(config); Pipeline takes a module itself",
        )
    recorder, why, given = ConstructorRecorder(fake), "", False
    try:
        with (
            torch.random.fork_rng(devices=[]),
            constructor_draws(),
            caches_kept(),
            fake,
            recorder,
            recorder.whole_initialisers(),
            FakeDeepCopy(),
        ):
            model = build()
            if any(not isinstance(p, FakeTensor) for p in [*model.parameters(), *model.buffers()]):
                why, seen = "it returns tensors made elsewhere", WeakSet(model.modules())
                del model  # one at a time: each may be as large as the real one
                model = build()
                given = any(module in seen for module in model.modules())
    except Exception as error:  # fake tensors break code in every way; an error of the user's own comes again
        with torch.random.fork_rng(devices=[]), constructor_draws():
            model = call_own(
                "the function that makes the model", build, hint="give its class, or lambda: Net(config)"
            )
        if not isinstance(model, nn.Module):
            raise CaptureError(
                f"the function that makes the model returned {of_type(model)}", hint="return an nn.Module"
            ) from None
        _refuse_lazy(model)
        why = f"{type(error).__name__}: {error}"
    if given:
        raise CaptureError(
            f"the function that makes the model returned {of_type(model)}, or a part of it, that was there "
            "already, so that two ranks or a comparison would train the same",
            hint="give Pipeline the module itself; or let the function make a new one each time, as "
            "lambda: copy.deepcopy(net)",
        )
    refuse_shared_memory(model)  # imitations have each their own
    hooks = parameter_hooks(model)  # imitations have none
    if why:
        return Blueprint(build, _imitate(model, fake), why_whole=why, hooks=hooks)
    return Blueprint(build, model, recorder.record, hooks=hooks)


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in _named_tensors(model).items():
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"{name} of the model has no shape yet, as all of a lazy module before its first call",
                hint="give the sizes in the constructor, as by nn.Linear in the place of nn.LazyLinear",
            )


def _imitate(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Replace every parameter and buffer by a fake one, keeping ties, those with plain attributes, too."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    if id(tensor) not in seen:
                        seen[id(tensor)] = (tensor, fake.from_tensor(tensor))
                    store[name] = seen[id(tensor)][1]  # type: ignore[assignment]

    def imitation(tensor: Tensor) -> Tensor:
        return seen[id(tensor)][1] if id(tensor) in seen else tensor

    for _, module, key, value in plain_attributes(model):
        if any(id(tensor) in seen for tensor in tensors_of(value)):
            vars(module)[key] = tree_map_only(Tensor, imitation, value)
    return model
