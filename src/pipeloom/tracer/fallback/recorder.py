"""Runs the whole forward once and writes down which tensor goes where.

Units run on real parameters, a few at a time; between them nothing but the tensors that cross is alive,
and no autograd graph: what requires a gradient is worked out call by call. Where nothing looks at data the
same run works on fake tensors, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from ...ir.graph import Value
from ..job import Job
from ..parameter_changes import refuse_new_tensor
from ..random import python_state, seeded
from ..tensors import tensors_of
from .absent_tensors import tensors_inside
from .intercepted_forward import START, InterceptedForward, call_name, glue_name
from .isolated_call import IsolatedCall
from .memory_meter import CallEffects
from .recorded_run import LOSS, RecordedRun, RecordedStep, SameStage, UnitCall, is_source
from .skeleton import ModuleUnit, Skeleton
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
from .skeleton import TrialParameters


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
