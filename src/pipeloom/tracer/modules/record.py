"""Runs the whole forward once and writes down which tensor goes where.

Units run on real parameters, a few at a time; between them nothing but the tensors that cross is alive,
and no autograd graph: what requires a gradient is worked out call by call. Where nothing looks at data the
same run works on fake tensors, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from ...ir.graph import Value
from ..guards import ParameterWatch, refuse_new_tensor
from ..job import Job
from ..random import call_draws, python_state, seeded
from ..tensors import LiveBytes, storage_ids, tensors_of
from .absent import tensors_inside
from .intercept import START, InterceptedForward, call_name, glue_name, output_name
from .skeleton import ModuleUnit, Skeleton, TrialParameters
from .torch_functions import (
    DETACHING,
    HOOKS,
    RANDOM,
    READS,
    SHAPES,
    count_numbers,
    leaves_in,
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
        "same" (leaf `index` of its result is leaf `argument` of what it was given; it has no own name).
    """

    name: str
    kind: Literal["result", "argument", "same", "attribute"]
    index: int = 0
    argument: int = 0
    module: str = ""
    attribute: str = ""


@dataclass(frozen=True, kw_only=True)
class UnitCall:
    """One call of a unit.

    inputs: for each leaf of its arguments the name of the tensor, None for anything else.
    spec, leaves: how to build its result; tensors are None among the leaves.
    stretch: functions that the glue called after it, up to the next unit.
    """

    name: str
    unit: str
    inputs: tuple[str | None, ...]
    outputs: tuple[UnitOutput, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    random: bool
    updates: tuple[str, ...]
    stretch: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One step of the run, in order: the call number `call`, or a function of the glue that follows it.

    call: -1 in front of the first unit call.  inputs: names of tensors, or "param:", "buffer:", "batch:" and
    a name.  updates: buffers that it changes.  read: it turns data into a Python value.
    text: of a function, with its arguments that are no tensors.
    """

    kind: Literal["call", "glue", "loss"]
    call: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: tuple[str, ...] = ()
    read: bool = False
    text: str = ""


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
    random: functions of the glue that drew random numbers.
    decides_on_data: modules whose own glue decides on data -> whether shapes depend on it too.
    python_random: Python's or NumPy's generators were used.
    changed_attributes: unit -> attributes, Python values, that it changed: other stages do not see that.
    parameter_watch: what it has changed in parameters, until that is judged.
    device: where it ran.
    evaluation_calls: calls of a run in evaluation mode, by name: what units return may differ.
    """

    calls: list[UnitCall] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    decisions: list[float] = field(default_factory=list)
    tainted_decisions: list[float] = field(default_factory=list)
    stale: set[str] = field(default_factory=set)
    changed_later: set[str] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    decides_on_data: dict[str, bool] = field(default_factory=dict)
    first_stretch: list[str] = field(default_factory=list)
    data_sized: set[str] = field(default_factory=set)
    same_stage: list[SameStage] = field(default_factory=list)
    python_random: bool = False
    changed_attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parameter_watch: ParameterWatch | None = None
    device: str = "cpu"
    evaluation_calls: Mapping[str, UnitCall] = field(default_factory=dict)

    def stretch(self, name: str) -> list[str]:
        """Functions called after the unit call of this name."""
        return self.first_stretch if name == START else self.call_named[name].stretch

    @property
    def call_named(self) -> dict[str, UnitCall]:
        return {call.name: call for call in self.calls}


class CallEffects(LiveBytes):  # type: ignore[no-untyped-call]
    """drew: whether any call drew random numbers.  statistics: storages of running statistics that were
    updated (a batch norm's schema does not say so, and its version counter does not move)."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False
        self.statistics: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.drew = self.drew or call_draws(func, args, kwargs or {})
        if "batch_norm" in str(func) and "backward" not in str(func):
            self.statistics |= storage_ids(tensors_of(args[3:5]))
        return result


class IsolatedCall:
    """Runs a unit on copies of what requires a gradient, and hands its results over without graph.

    leaves: flattened arguments.  outputs: tensors that it hands over, by name.  updates: buffers it changed.
    changed_attributes: names of attributes that are Python values and that it changed.
    """

    def __init__(self, skeleton: Skeleton, unit: ModuleUnit, leaves: Sequence[Any]) -> None:
        self.skeleton = skeleton
        self.unit = unit
        self.leaves = leaves
        self.arguments = [_with_graph(leaf) for leaf in leaves]
        self.outputs: dict[str, Tensor] = {}
        self.updates: tuple[str, ...] = ()
        self.changed_attributes: tuple[str, ...] = ()
        self._changed: list[int] = []
        self._new_attributes: list[tuple[str, str, Tensor]] = []
        self._flat: list[Any] = []

    def run(self, spec: TreeSpec, state: Mapping[str, Tensor], meter: CallEffects) -> TreeSpec:
        """Run it with these parameters. Returns how its result is built of leaves."""
        versions = [_version(leaf) for leaf in self.arguments]
        buffers = {n: (t, t._version) for n, t in state.items() if n not in self.skeleton.params}
        parameters = {n: (t, t.untyped_storage()._cdata) for n, t in state.items() if n not in buffers}
        with self.skeleton.using(state):
            before = {(m, a): id(t) for m, a, t in attributes(self.unit.module)}
            values = _python_values(self.unit.module)
            with meter:
                args, kwargs = tree_unflatten(self.arguments, spec)
                result = self.unit.original_forward(*args, **kwargs)
            self.updates = tuple(
                name
                for name, (tensor, version) in buffers.items()
                if _updated(self.skeleton.current(name), tensor, version, meter)
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
        open_up(result)
        self._flat, built = tree_flatten(result)
        return built

    def detached_outputs(self, call: str) -> tuple[tuple[UnitOutput, ...], list[Any]]:
        """Let go of the unit's autograd graph.

        call: name of the call, from which the names of the outputs are made.
        Returns: what other code sees of the call, and the leaves of its result.
        """
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
            if not isinstance(leaf, Tensor):
                flat.append(leaf)
            elif source is not None:
                flat.append(self.leaves[source])
                outputs.append(UnitOutput(name="", kind="same", index=index, argument=source))
            else:
                flat.append(_without_graph(leaf))
                outputs.append(self._output(output_name(call, index), flat[-1], kind="result", index=index))
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


def _updated(now: Tensor, before: Tensor, version: int, meter: CallEffects) -> bool:
    """Whether a buffer has a next state. One that a gradient flows through is a result, not a state."""
    if now is not before:
        return not now.requires_grad
    return before._version != version or before.untyped_storage()._cdata in meter.statistics


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


class Traits(NamedTuple):
    """What follows for a tensor from those that it was made of.

    tainted: it depends on the model, not only on the batch and on random numbers.
    data_sized: its shape depends on data.
    """

    tainted: bool
    data_sized: bool = False


class KnownTensor(NamedTuple):
    """A tensor of the run. version: its version counter when it got its name."""

    name: str
    version: int
    traits: Traits


class ForwardRecorder(InterceptedForward):
    """A run of the whole model that fills `recording`.
    forced: what the tainted reads of an earlier run gave: this one takes the same way.
    trunks: modules that are no units but have units below.
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
        self.storages: dict[int, str] = {}
        self.meter = CallEffects()
        self.call_of_storage: dict[int, int] = {}
        self.python_state = python_state()

    def record(self, job: Job, batch: Mapping[str, Tensor]) -> RecordedRun:
        """Run model and loss on a micro-batch."""
        self.batch = frozenset(batch)
        for key, tensor in batch.items():
            self._name(tensor, f"batch:{key}", Traits(tainted=False))
        with self._watching_trunks(), torch.enable_grad():
            loss = self.loss(job, batch)
        names = self._names([loss])
        self.recording.steps.append(RecordedStep(kind="loss", call=self._last_call, inputs=names, outputs=()))
        self.recording.values[LOSS] = _value(LOSS, loss)
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

    def _name(self, tensor: Tensor, name: str, traits: Traits) -> None:
        self.tensors[tensor] = KnownTensor(name, tensor._version, traits)
        if traits.data_sized:
            self.recording.data_sized.add(name)
        self.recording.values[name] = _value(name, tensor)
        if not isinstance(tensor, FakeTensor) and not is_source(name):
            self.recording.samples[name] = tensor.detach()

    def _source(self, tensor: Tensor, reader: int | None = None) -> KnownTensor | None:
        """What is known of a tensor that glue or a unit reads; None for a constant.

        reader: number of the call that reads it, or whose stretch does: the last one unless given.
        """
        known: KnownTensor | None = self.tensors.get(tensor)
        if known is None:
            maker = self.call_of_storage.get(tensor.untyped_storage()._cdata)
            if maker is None or not self.meter.made(tensor):
                return None
            why = (
                f"the forward uses a tensor that {self.recording.calls[maker].name} neither returns nor keeps"
            )
            reader = self._last_call if reader is None else reader
            self.recording.same_stage.append(SameStage(maker, reader, f"{why} as an attribute"))
            return KnownTensor("", 0, Traits(tainted=True))
        if tensor.requires_grad and not self.recording.values[known.name].needs_grad:
            # an autograd function of the user's has given it one after it was made
            self.recording.values[known.name] = _value(known.name, tensor)
        if known.version != tensor._version:
            self.recording.stale.add(known.name)
        return known

    def _names(self, tensors: Sequence[Tensor], reader: int | None = None) -> tuple[str, ...]:
        """Names of what is read; for one changed through a view also that of the change."""
        names: dict[str, None] = {}
        for tensor in tensors:
            known = self._source(tensor, reader)
            if known is not None and known.name:
                names[known.name] = None
                if known.version != tensor._version:
                    change = self.storages.get(tensor.untyped_storage()._cdata)
                    names |= {change: None} if change else {}
        return tuple(names)

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
            self._name(real, f"{kind}:{name}", Traits(tainted=True))
        return real

    # --- functions of the glue --------------------------------------------------------------------

    def function(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in HOOKS:
            refuse_hook(name)
        if name == "__set__.data" and (parameter := self.skeleton.name_of(args[0])) in self.skeleton.params:
            refuse_new_tensor(parameter)
        args, kwargs = tree_map(self._real_tensor, (args, kwargs))
        tensors = [leaf for leaf in leaves_in(args, kwargs) if isinstance(leaf, Tensor)]
        sources = [known for t in tensors if (known := self._source(t)) is not None]
        tainted = any(known.traits.tainted for known in sources)
        data_sized = any(known.traits.data_sized for known in sources)
        if data_sized and name in SHAPES and tainted:
            self._keep_rest_together(
                f"the forward asks for the size of {sources[0].name}, which depends on data"
            )
        if name in READS:
            return self._read(function, name, args, kwargs, tainted=tainted)
        if sized_by_data(name, args):
            data_sized = True
            if tainted:
                self.recording.decides_on_data[self.trunk_stack[-1]] = True
        names = self._names(tensors)
        versions = [t._version for t in tensors]
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        # without tensors it may be the user's `torch.no_grad` itself, which must last
        with torch.no_grad() if tensors else nullcontext(), self._drawing(name):
            result = function(*args, **kwargs)
        new = tensors_of(result)
        changed = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        if new or changed:
            untouched = {id(t) for t in tensors} - {id(t) for t in changed}
            results = new + [t for t in changed if not any(t is m for m in new)]
            outputs = [(i, t) for i, t in enumerate(results) if id(t) not in untouched]
            if needs_grad and name not in DETACHING:
                _require_grad([tensor for _, tensor in outputs])
            updates = self._changed_buffers(changed)
            self._record_function(name, names, outputs, updates, Traits(tainted, data_sized), (args, kwargs))
        return result

    def _record_function(
        self,
        name: str,
        inputs: tuple[str, ...],
        outputs: list[tuple[int, Tensor]],
        updates: tuple[str, ...],
        traits: Traits,
        arguments: object,
    ) -> None:
        """A function of the glue has run. outputs: what it made or changed, with positions among its results.
        updates: buffers that it changed."""
        function = self.place()
        self._stretch().append(name)
        names = []
        for position, tensor in outputs:
            names.append(f"{function}:{position}" if position else function)
            self._name_change(tensor, names[-1], traits)
        self.recording.steps.append(
            RecordedStep(
                kind="glue",
                call=self._last_call,
                inputs=inputs,
                outputs=tuple(names),
                updates=updates,
                text=f"{name}{[a for a in leaves_in(arguments) if not isinstance(a, Tensor)]}",
            )
        )

    def _stretch(self) -> list[str]:
        return self.recording.calls[-1].stretch if self.recording.calls else self.recording.first_stretch

    def _name_change(self, tensor: Tensor, name: str, traits: Traits) -> None:
        """A tensor is new, or has new content under a new name."""
        before: KnownTensor | None = self.tensors.get(tensor)
        if before is not None:
            self.recording.changed_later.add(before.name)
        self.storages[tensor.untyped_storage()._cdata] = name
        self._name(tensor, name, traits)

    @property
    def _last_call(self) -> int:
        return len(self.recording.calls) - 1

    def _keep_rest_together(self, why: str) -> None:
        """No later stage could replay this stretch: what follows stays together."""
        self.recording.same_stage.append(SameStage(max(self._last_call, 0), -1, why))

    def _changed_buffers(self, changed: Sequence[Tensor]) -> tuple[str, ...]:
        names = [known.name for t in changed if (known := self.tensors.get(t)) is not None]
        return tuple(n.removeprefix("buffer:") for n in names if n.startswith("buffer:"))

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        """Seed a function that may draw, and note whether one does."""
        with CallEffects() as meter:
            if name in RANDOM:
                with seeded(self.seed, glue_name(self.stretch, self.index, 0)):
                    yield
            else:
                yield
        if meter.drew:
            self.recording.random.add(name)

    def _read(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, tainted: bool
    ) -> Any:
        tensor = args[0]
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
            tensors = [leaf for leaf in leaves_in(args, kwargs) if isinstance(leaf, Tensor)]
            self.recording.steps.append(
                RecordedStep(
                    kind="glue", call=self._last_call, inputs=self._names(tensors), outputs=(), read=True
                )
            )
        return result

    # --- units ------------------------------------------------------------------------------------

    def call(self, unit: ModuleUnit, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = call_name(unit.fqn, number)
        self.call_of_storage = {s: n for s, n in self.call_of_storage.items() if s in self.meter.alive}
        open_up((args, kwargs))
        leaves, spec = tree_flatten(tree_map(self._real_tensor, (args, kwargs)))
        tensors = [t for leaf in leaves for t in (leaf, *tensors_inside(leaf)) if isinstance(t, Tensor)]
        names = self._names(tensors, reader=len(self.recording.calls))
        inputs = tuple(self._leaf_name(leaf) for leaf in leaves)
        traits = Traits(True, any(name in self.recording.data_sized for name in names))
        run = IsolatedCall(self.skeleton, unit, leaves)
        with seeded(self.seed, name):
            self.meter.drew = False
            self.meter.statistics.clear()
            built = run.run(spec, self.parameters.state(self.skeleton.below(unit.fqn)), self.meter)
        drew = self._python_drew()
        if run.changed_attributes:
            self.recording.changed_attributes[unit.fqn] = run.changed_attributes
        outputs, flat = run.detached_outputs(f"{name}:0" if name in self.batch else name)
        for output in outputs:
            if output.kind != "same":
                self._name_change(run.outputs[output.name], output.name, traits)
        for storage in self.meter.alive:
            self.call_of_storage.setdefault(storage, len(self.recording.calls))
        self.recording.calls.append(
            UnitCall(
                name=name,
                unit=unit.fqn,
                inputs=inputs,
                outputs=outputs,
                spec=built,
                leaves=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in flat),
                random=self.meter.drew or drew,
                updates=run.updates,
            )
        )
        self.recording.steps.append(
            RecordedStep(
                kind="call",
                call=self._last_call,
                inputs=names,
                updates=run.updates,
                outputs=tuple(o.name for o in outputs if o.kind != "same"),
            )
        )
        return tree_unflatten(flat, built)

    def _leaf_name(self, leaf: Any) -> str | None:
        known: KnownTensor | None = self.tensors.get(leaf) if isinstance(leaf, Tensor) else None
        return known.name if known is not None else None

    def _record_replaced_buffers(self) -> None:
        """Buffers and attributes that the glue replaced by new tensors; the resting ones come back."""
        for name in self.skeleton.names:
            tensor = self.skeleton.current(name)
            if tensor is self.skeleton.resting(name):
                continue
            known: KnownTensor | None = self.tensors.get(tensor)
            for index, step in enumerate(self.recording.steps):
                if known is not None and known.name in step.outputs:
                    self.recording.steps[index] = replace(step, updates=(*step.updates, name))
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


def _value(name: str, tensor: Tensor) -> Value:
    return Value(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        needs_grad=tensor.requires_grad,
    )


def _require_grad(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.requires_grad_()
