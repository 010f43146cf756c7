"""Runs the whole forward once and writes down which tensor goes where.

Units run on real parameters, a few at a time; between them nothing but the tensors that cross is alive,
and no autograd graph: what requires a gradient is worked out call by call. Where nothing looks at data the
same run works on fake tensors, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from ...ir.errors import CaptureError
from ...ir.graph import Value
from ...ir.user_code import at, user_line
from ..guards import ParameterWatch, refuse_new_tensor
from ..job import Job
from ..random import call_draws, python_state, seeded
from ..tensors import LiveBytes, storage_ids, tensors_of, written_by
from .absent import is_sendable, tensors_inside
from .containers import changed, handed_over
from .intercept import START, InterceptedForward, call_name
from .skeleton import ModuleUnit, Skeleton, TrialParameters
from .torch_functions import (
    DETACHING,
    HOOKS,
    RANDOM,
    READS,
    SHAPES,
    count_numbers,
    open_up,
    python_value,
    read_numbers,
    refuse_hook,
    sized_by_data,
)

LOSS = "=loss"
"""Name of the loss; no module can have it."""


def is_source(name: str) -> bool:
    """Whether a name stands for a parameter, buffer or batch input."""
    return name.startswith(("param:", "buffer:", "batch:"))


@dataclass(frozen=True, kw_only=True)
class UnitOutput:
    """A tensor that a unit call hands over.

    kind: "result" (leaf `index` of what it returns), "argument" (leaf `index` of what it was given, which it
        changed), "attribute" (it left the tensor in attribute `attribute` of module `module` below it), or
        "same" (leaf `index` of its result is leaf `argument` of what it was given, a tensor or an object;
        it has no own name).
    """

    name: str
    kind: Literal["result", "argument", "same", "attribute"]
    index: int = 0
    argument: int = 0
    module: str = ""
    attribute: str = ""


class Origins(NamedTuple):
    """What a tensor is made of: values at the edges of units, parameters, buffers and batch inputs.

    reads: their names.  flows: those through which a gradient of the tensor flows back.
    """

    reads: frozenset[str] = frozenset()
    flows: frozenset[str] = frozenset()

    def __or__(self, other: Origins) -> Origins:
        return Origins(self.reads | other.reads, self.flows | other.flows)


@dataclass(frozen=True, kw_only=True)
class UnitCall:
    """One call of a unit.

    arguments: leaf of its arguments -> its name, of those tensors that the call before it makes.
    made_of: what each of these is made of, by name.  others: what the other ones are made of.
    spec, leaves: how to build its result; tensors are None among the leaves.
    fills: it changes containers that it is given: its result is then a pair of that and its arguments.
    """

    name: str
    unit: str
    arguments: Mapping[int, str]
    made_of: Mapping[str, Origins]
    others: Origins
    outputs: tuple[UnitOutput, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    random: bool
    updates: tuple[str, ...]
    fills: bool


@dataclass(frozen=True, kw_only=True)
class GlueEffect:
    """Code behind unit call `call` (-1: before the first one) changes buffers, or decides on data.

    reads: as `Origins` has them.
    """

    call: int
    reads: frozenset[str]
    updates: tuple[str, ...] = ()


class SameStage(NamedTuple):
    """Unit calls that must run in one stage: from the first to the last by their numbers (-1: to the end of
    the forward), and why."""

    first: int
    last: int
    why: str


@dataclass(eq=False)
class RecordedRun:
    """A recorded run.

    values: every tensor by name.  samples: their data, if the run had any.
    decisions: what the glue read from data, in order; `tainted_decisions` are those that depend on the model.
    stale: values that were changed through another view of their storage; they cannot be sent.
    data_sized: values whose shape depends on data; neither can they.
    same_stage: unit calls that no cut may separate.
    changed_later: values that a unit or the glue changes in place.
    random: functions of the glue that drew random numbers; `drew_after` are the calls that they followed.
    effects: what the glue did besides making tensors.  loss: what the loss is made of.
    glue: the functions that it called, as text.
    decides_on_data: modules whose own glue decides on data -> whether shapes depend on it too.
    python_random: Python's or NumPy's generators were used.
    changed_attributes: unit -> attributes, Python values, that it changed: other stages do not see that.
    parameter_watch: what it has changed in parameters, until that is judged.  changed_parameters: those that
        it may change.
    device: where it ran.
    evaluation_calls: calls of a run in evaluation mode, by name: what units return may differ.
    """

    calls: list[UnitCall] = field(default_factory=list)
    effects: list[GlueEffect] = field(default_factory=list)
    glue: list[str] = field(default_factory=list)
    loss: Origins = Origins()
    values: dict[str, Value] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    decisions: list[float] = field(default_factory=list)
    tainted_decisions: list[float] = field(default_factory=list)
    stale: set[str] = field(default_factory=set)
    changed_later: set[str] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    drew_after: set[int] = field(default_factory=set)
    decides_on_data: dict[str, bool] = field(default_factory=dict)
    data_sized: set[str] = field(default_factory=set)
    same_stage: list[SameStage] = field(default_factory=list)
    python_random: bool = False
    changed_attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parameter_watch: ParameterWatch | None = None
    changed_parameters: tuple[str, ...] = ()
    device: str = "cpu"
    evaluation_calls: Mapping[str, UnitCall] = field(default_factory=dict)


class CallEffects(LiveBytes):  # type: ignore[no-untyped-call]
    """drew: whether any call drew random numbers.  written: storages that were written to. Version counters
    do not move for running statistics, of which a batch norm's schema says nothing, or by way of `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.drew = self.drew or call_draws(func, args, kwargs or {})
        if "batch_norm" in str(func) and "backward" not in str(func) and args[5:6] != (False,):  # training
            self.written |= storage_ids(tensors_of(args[3:5]))
        self.written |= storage_ids(tensors_of(written_by(func, args, kwargs or {})))
        return result


class IsolatedCall:
    """Runs a unit on copies of what requires a gradient, and hands its results over without graph.

    leaves: flattened arguments.  outputs: tensors that it hands over, by name.  updates: buffers it changed.
    changed_attributes: names of attributes that are Python values and that it changed.  fills: as `UnitCall`.
    """

    def __init__(self, skeleton: Skeleton, unit: ModuleUnit, leaves: Sequence[Any]) -> None:
        self.skeleton = skeleton
        self.unit = unit
        self.leaves = leaves
        self.arguments = [_with_graph(leaf) for leaf in leaves]
        self.outputs: dict[str, Tensor] = {}
        self.updates: tuple[str, ...] = ()
        self.changed_attributes: tuple[str, ...] = ()
        self.fills = False
        self._changed: list[int] = []
        self._new_attributes: list[tuple[str, str, Tensor]] = []
        self._flat: list[Any] = []

    def run(self, spec: TreeSpec, state: Mapping[str, Tensor], meter: CallEffects) -> TreeSpec:
        """Returns how its result is built of leaves."""
        versions = [_version(leaf) for leaf in self.arguments]
        buffers = {n: t for n, t in state.items() if n not in self.skeleton.params}
        parameters = {n: (t, t.untyped_storage()._cdata) for n, t in state.items() if n not in buffers}
        with self.skeleton.using(state):
            before = {(m, a): id(t) for m, a, t in attributes(self.unit.module)}
            values = _python_values(self.unit.module)
            with meter:
                args, kwargs = tree_unflatten(self.arguments, spec)
                result = self.unit.original_forward(*args, **kwargs)
            open_up((result, args, kwargs))
            self.fills = changed(self.arguments, spec, (args, kwargs))
            if self.fills:
                result = result, (args, kwargs)
            self.updates = tuple(
                name
                for name, tensor in buffers.items()
                if _updated(self.skeleton.current(name), tensor, meter)
            )
            for name, (tensor, storage) in parameters.items():
                now_there = self.skeleton.current(name)
                if now_there is not tensor or tensor.untyped_storage()._cdata != storage:
                    refuse_new_tensor(name)
            self._new_attributes = [
                (m, a, t) for m, a, t in attributes(self.unit.module) if before.get((m, a)) != id(t)
            ]
            now = _python_values(self.unit.module)
            self.changed_attributes = tuple(n for n, v in now.items() if n not in values or values[n] != v)
        torch.clear_autocast_cache()
        self._changed = [i for i, leaf in enumerate(self.arguments) if _version(leaf) != versions[i]]
        self._flat, built = tree_flatten(result)
        return built

    def detached_outputs(self, call: str) -> tuple[tuple[UnitOutput, ...], list[Any]]:
        """What other code sees of the call of this name, and the leaves of its result, without graph."""
        outputs = []
        for index in self._changed:
            leaf, copy = self.leaves[index], self.arguments[index]
            if leaf is not copy:
                with torch.no_grad():
                    leaf.copy_(copy)
                leaf.requires_grad_(copy.requires_grad)
            outputs.append(self._output(f"{call}:given{index}", leaf, kind="argument", index=index))
        flat = []
        for index, leaf in enumerate(self._flat):
            source = next((i for i, g in enumerate(self.arguments) if g is leaf), None)
            if not isinstance(leaf, Tensor) and (source is None or is_sendable(leaf)):
                flat.append(leaf)
            elif source is not None:
                flat.append(self.leaves[source])
                outputs.append(UnitOutput(name="", kind="same", index=index, argument=source))
            else:
                flat.append(_without_graph(leaf))
                name = f"{call}:{index}" if index else call
                outputs.append(self._output(name, flat[-1], kind="result", index=index))
        for path, attribute, tensor in self._new_attributes:
            detached = next((f for f, o in zip(flat, self._flat, strict=True) if o is tensor), None)
            detached = _without_graph(tensor) if detached is None else detached
            setattr(self.unit.module.get_submodule(path), attribute, detached)
            name = f"{call}:{path}.{attribute}" if path else f"{call}:{attribute}"
            if not any(detached is output for output in self.outputs.values()):
                outputs.append(
                    self._output(name, detached, kind="attribute", module=path, attribute=attribute)
                )
        return tuple(outputs), flat

    def _output(self, name: str, tensor: Tensor, **how: Any) -> UnitOutput:
        self.outputs[name] = tensor
        return UnitOutput(name=name, **how)


def _updated(now: Tensor, before: Tensor, meter: CallEffects) -> bool:
    """Whether a buffer has a next state. One that a gradient flows through is a result, not a state."""
    if now is not before:
        return not now.requires_grad
    return before.untyped_storage()._cdata in meter.written


def attributes(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors that are plain attributes of a module or of one below: path, attribute, tensor."""
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            if isinstance(value, Tensor):
                yield path, key, value


def _python_values(module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{key}" if path else key: value
        for path, inner in module.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, (bool, int, float, str))
    }


def _with_graph(leaf: Any) -> Any:
    """A tensor that requires a gradient is copied, as a unit may change it in place."""
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return leaf.detach().requires_grad_().clone()
    return leaf


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) else 0


class KnownTensor(NamedTuple):
    """A tensor of the run.

    name: if it is a source, or lies at the edge of a unit.  version: its version counter then.
    made: number of the last call before it was made.
    tainted: it depends on the model, not only on the batch and on random numbers.
    data_sized: its shape depends on data.
    """

    origins: Origins
    version: int
    made: int
    tainted: bool
    data_sized: bool = False
    name: str = ""


class ForwardRecorder(InterceptedForward):
    """A run of the whole model that fills `recording`.
    forced: what the tainted reads of an earlier run gave: this one takes the same way.
    trunks: modules that are no units but have units below.

    state_names: parameters and buffers in use -> FQN.
    changes: storage -> what was written into it in place.  names_in: storage -> named tensors that lie there.
    calls_before: name of a value -> the unit calls that it depends on, as bits.  calls_of: those of a call.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        parameters: TrialParameters,
        *,
        forced: Sequence[float] = (),
        trunks: Sequence[str] = (),
    ) -> None:
        super().__init__(skeleton, seed=0)
        self.recording = RecordedRun()
        self.parameters = parameters
        self.forced = list(forced)
        self.trunks = trunks
        self.trunk_stack = [""]
        self.batch: frozenset[str] = frozenset()
        self.tensors: Any = WeakTensorKeyDictionary()
        self.state_names: Any = WeakTensorKeyDictionary()
        self.changes: dict[int, Origins] = {}
        self.names_in: dict[int, set[str]] = {}
        self.calls_before: dict[str, int] = {}
        self.calls_of: list[int] = []
        self.meter = CallEffects()
        self.call_of_storage: dict[int, int] = {}
        self.python_state = python_state()

    def record(self, job: Job, batch: Mapping[str, Tensor]) -> RecordedRun:
        self.batch = frozenset(batch)
        for key, tensor in batch.items():
            self._name(tensor, f"batch:{key}", tainted=False)
        with self._watching_trunks(), torch.enable_grad():
            loss = self.loss(job, batch)
        known = self._known(loss)
        self.recording.loss = known.origins if known is not None else Origins()
        self.recording.values[LOSS] = value_of(LOSS, loss)
        self._record_replaced_buffers()
        return self.recording

    def after(self, job: Job, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().after(job, outputs, batch)
        self.recording.python_random = self._python_drew() or self.recording.python_random
        return loss

    def seed_python(self, place: str) -> None:
        """Note, where the next stretch or unit begins, whether the last one drew."""
        if place != START:
            self.recording.python_random = self._python_drew() or self.recording.python_random
        super().seed_python(place)
        self.python_state = python_state()

    def _python_drew(self) -> bool:
        return python_state() != self.python_state

    # --- tensors and their names ------------------------------------------------------------------

    def _name(
        self, tensor: Tensor, name: str, *, tainted: bool, data_sized: bool = False, calls: int = 0
    ) -> None:
        """A tensor is a source, or lies at the edge of a unit. calls: that it depends on, as bits."""
        reads = frozenset({name})
        origins = Origins(reads, reads if tensor.requires_grad else frozenset())
        self.tensors[tensor] = KnownTensor(
            origins, tensor._version, self._last_call, tainted, data_sized, name
        )
        self.names_in.setdefault(_storage(tensor), set()).add(name)
        self.calls_before[name] = calls
        if data_sized:
            self.recording.data_sized.add(name)
        self.recording.values[name] = value_of(name, tensor)
        if not isinstance(tensor, FakeTensor) and not is_source(name):
            self.recording.samples[name] = tensor.detach()

    def _known(self, tensor: Tensor, reader: int | None = None) -> KnownTensor | None:
        """What is known of a tensor that glue or a unit reads; None for a constant.

        reader: number of the call that reads it, or whose stretch does: the last one unless given.
        """
        known: KnownTensor | None = self.tensors.get(tensor)
        if known is None:
            maker = self.call_of_storage.get(_storage(tensor))
            if maker is None or not self.meter.made(tensor):
                return None
            why = (
                f"the forward uses a tensor that {self.recording.calls[maker].name} neither returns nor keeps"
            )
            reader = self._last_call if reader is None else reader
            self.recording.same_stage.append(SameStage(maker, reader, f"{why} as an attribute"))
            return KnownTensor(Origins(), 0, self._last_call, tainted=True)
        if known.name and tensor.requires_grad and not self.recording.values[known.name].needs_grad:
            # an autograd function of the user's has given it one after it was made
            self.recording.values[known.name] = value_of(known.name, tensor)
            known = known._replace(origins=Origins(known.origins.reads, known.origins.reads))
            self.tensors[tensor] = known
        if known.version != tensor._version:  # changed through a view
            if known.name:
                self.recording.stale.add(known.name)
            known = known._replace(
                name="", origins=known.origins | self.changes.get(_storage(tensor), Origins())
            )
        return known

    def _real_tensor(self, leaf: Any) -> Any:
        """The tensor to compute with in place of a resting parameter or buffer."""
        if not isinstance(leaf, Tensor):
            return leaf
        name = self.skeleton.name_of(leaf)
        if name is None:
            return leaf
        real = self.parameters.pinned(name)
        if real not in self.tensors:
            kind = "param" if name in self.skeleton.params else "buffer"
            self._name(real, f"{kind}:{name}", tainted=True)
            self.state_names[real] = name
        return real

    # --- functions of the glue --------------------------------------------------------------------

    def function(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in HOOKS:
            refuse_hook(name)
        if name == "__set__.data" and (parameter := self.skeleton.name_of(args[0])) in self.skeleton.params:
            refuse_new_tensor(parameter)
        args, kwargs = tree_map(self._real_tensor, (args, kwargs))
        tensors = tensors_of((args, kwargs))
        sources = [known for tensor in tensors if (known := self._known(tensor)) is not None]
        tainted = any(known.tainted for known in sources)
        data_sized = any(known.data_sized for known in sources)
        origins = _union(sources)
        if data_sized and name in SHAPES and tainted:
            # no later stage could replay this stretch: what follows stays together
            why = "the forward asks for the size of a tensor that depends on data"
            self.recording.same_stage.append(SameStage(max(self._last_call, 0), -1, why))
        if name in READS:
            return self._read(function, name, args, kwargs, origins, tainted=tainted)
        if sized_by_data(name, args):
            data_sized = True
            if tainted:
                self.recording.decides_on_data[self.trunk_stack[-1]] = True
        versions = [t._version for t in tensors]
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        # without tensors it may be the user's `torch.no_grad` itself, which must last
        with torch.no_grad() if tensors else nullcontext(), self._drawing(name):
            result = function(*args, **kwargs)
        new = tensors_of(result)
        changed = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        if new or changed:
            self.index += 1
            self.recording.glue.append(
                f"{name}{[a for a in tree_leaves((args, kwargs)) if not isinstance(a, Tensor)]}"
            )
            untouched = {id(t) for t in tensors} - {id(t) for t in changed}
            outputs = [t for t in (*new, *changed) if id(t) not in untouched]
            if needs_grad and name not in DETACHING:
                for tensor in outputs:
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.requires_grad_()
            written = {_storage(t) for t in changed}  # by way of a view or of `.data`, too
            names = [name for t, name in self.state_names.items() if _storage(t) in written]
            if updates := tuple(name for name in names if name not in self.skeleton.params):
                self.recording.effects.append(
                    GlueEffect(call=self._last_call, reads=origins.reads, updates=updates)
                )
            for tensor in changed:
                self._note_change(tensor, origins)
            given = {_storage(t) for t in tensors}
            for tensor in outputs:
                if _storage(tensor) not in given:
                    self.changes.pop(_storage(tensor), None)
                flows = origins.flows if tensor.requires_grad else frozenset()
                made_of = Origins(origins.reads, flows)
                self.tensors[tensor] = KnownTensor(
                    made_of, tensor._version, self._last_call, tainted, data_sized
                )
        return result

    def _note_change(self, tensor: Tensor, origins: Origins) -> None:
        """A tensor has new content, and so has all that lies in its storage."""
        storage = _storage(tensor)
        self.recording.changed_later |= self.names_in.get(storage, set())
        self.changes[storage] = self.changes.get(storage, Origins()) | origins

    @property
    def _last_call(self) -> int:
        return len(self.recording.calls) - 1

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        """Seed a function that may draw, and note whether one does."""
        place = f"{self.stretch}/{self.index}"
        with CallEffects() as meter, seeded(self.seed, place) if name in RANDOM else nullcontext():
            yield
        if meter.drew:
            self.recording.random.add(name)
            self.recording.drew_after.add(self._last_call)

    def _read(
        self,
        function: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origins: Origins,
        *,
        tainted: bool,
    ) -> Any:
        tensor = tensors_of((args, kwargs))[0]
        if tainted and self.forced:
            count = count_numbers(name, tensor)
            numbers, self.forced = self.forced[:count], self.forced[count:]
            result = python_value(name, numbers, tensor)
        else:
            with torch.no_grad():
                result = function(*args, **kwargs)
            numbers = read_numbers(result)
        self.recording.decisions += numbers
        if tainted:
            self.recording.tainted_decisions += numbers
            self.recording.decides_on_data.setdefault(self.trunk_stack[-1], False)
            self.recording.effects.append(GlueEffect(call=self._last_call, reads=origins.reads))
        return result

    # --- units ------------------------------------------------------------------------------------

    def call(self, unit: ModuleUnit, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = call_name(unit.fqn, number)
        self.call_of_storage = {s: n for s, n in self.call_of_storage.items() if s in self.meter.alive}
        open_up((args, kwargs))
        leaves, spec = tree_flatten(tree_map(self._real_tensor, (args, kwargs)))
        number = len(self.recording.calls)
        arguments: dict[int, str] = {}
        made_of: dict[str, Origins] = {}
        others: list[KnownTensor] = []
        calls, data_sized = 1 << number, False
        for index, leaf in enumerate(leaves):
            for tensor in [leaf] if isinstance(leaf, Tensor) else tensors_inside(leaf):
                assert isinstance(tensor, Tensor), "nothing is absent where the whole forward runs"
                if (known := self._known(tensor, reader=number)) is None:
                    continue
                data_sized = data_sized or known.data_sized
                before = reduce(or_, (self.calls_before[name] for name in known.origins.reads), 0)
                calls |= before
                if tensor is not leaf or known.name in made_of or not self._belongs_to_last_call(before):
                    others.append(known)
                    continue
                arguments[index] = f"{name}<{index}"
                made_of[arguments[index]] = known.origins
                self._name(
                    tensor, arguments[index], tainted=known.tainted, data_sized=known.data_sized, calls=before
                )
        self.calls_of.append(calls)
        run = IsolatedCall(self.skeleton, unit, leaves)
        with seeded(self.seed, name):
            self.meter.drew = False
            self.meter.written.clear()
            built = run.run(spec, self.parameters.state(self.skeleton.below(unit.fqn)), self.meter)
        drew = self._python_drew()
        if run.changed_attributes:
            self.recording.changed_attributes[unit.fqn] = run.changed_attributes
        outputs, flat = run.detached_outputs(f"{name}:0" if name in self.batch else name)
        for storage in self.meter.alive:
            self.call_of_storage.setdefault(storage, number)
        self.recording.calls.append(
            UnitCall(
                name=name,
                unit=unit.fqn,
                arguments=arguments,
                made_of=made_of,
                others=_union(others),
                outputs=outputs,
                spec=built,
                leaves=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in flat),
                random=self.meter.drew or drew,
                updates=run.updates,
                fills=run.fills,
            )
        )
        for output in outputs:
            if output.kind != "same":
                tensor = run.outputs[output.name]
                if output.kind == "argument":
                    reads = frozenset({output.name})
                    self._note_change(tensor, Origins(reads, reads if tensor.requires_grad else frozenset()))
                self._name(tensor, output.name, tainted=True, data_sized=data_sized, calls=calls)
        result = tree_unflatten(flat, built)
        return handed_over(result, (args, kwargs)) if run.fills else result

    def _belongs_to_last_call(self, calls: int) -> bool:
        """Whether what depends on these calls can be made where the last one ran: it needs its results, and
        nothing but what that needed."""
        last = self._last_call
        return last >= 0 and bool(calls & (1 << last)) and not calls & ~self.calls_of[last]

    def _record_replaced_buffers(self) -> None:
        """Buffers and attributes that the glue replaced by new tensors; the resting ones come back."""
        for name in self.skeleton.names:
            tensor = self.skeleton.current(name)
            if tensor is self.skeleton.resting(name):
                continue
            known: KnownTensor | None = self.tensors.get(tensor)
            if known is not None and not is_source(known.name):
                self.recording.effects.append(
                    GlueEffect(call=known.made, reads=known.origins.reads, updates=(name,))
                )
        self.skeleton.rest()

    @contextmanager
    def _watching_trunks(self) -> Iterator[None]:
        """Know in `trunk_stack` which module's own code runs."""

        def enter(fqn: str) -> Callable[..., None]:
            return lambda *_: self.trunk_stack.append(fqn)

        def leave(*_: Any) -> None:
            self.trunk_stack.pop()

        handles = []
        for fqn in self.trunks:
            module = self.skeleton.model.get_submodule(fqn)
            handles += [module.register_forward_pre_hook(enter(fqn)), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def value_of(name: str, tensor: Tensor) -> Value:
    return Value(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        needs_grad=tensor.requires_grad,
    )


def _storage(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"the forward has a sparse tensor between modules{at(user_line())}, which no rank can send",
            hint="make it, of indices and values that are dense, and use it in the forward of one module",
        )
    return int(tensor.untyped_storage()._cdata)


def _union(tensors: Iterable[KnownTensor]) -> Origins:
    return reduce(or_, (known.origins for known in tensors), Origins())
