"""One stage's part of the user's forward.

The forward runs from its start. Units of other stages are stubs that return what was received, or tensors
without data; glue runs where its data is. The run ends at the first unit behind the stage's own ones.

    forward    embed     x + p    blocks.0   x + y    blocks.1        x + y    head            loss
    stage 0    runs      runs     runs       runs     sends, stops
    stage 1    stub      shapes   stub       shapes   gets, runs      runs     sends, stops
    stage 2    stub      shapes   stub       shapes   stub            shapes   gets, runs      runs

sends: the argument that a unit is called with is bound to the name of a value that crosses.  gets: the
received tensor of that name takes its place, here and wherever else it is read.  shapes: no data, on the
meta device.

A value that crosses is bound at the edge of a unit, on both sides alike: what a call returns, and what the
call behind the sender is called with. Where the glue takes another way than recorded, that is the argument,
at the same position, of whichever unit comes next. So a branch on data between modules may change what runs;
what it cannot do is make other values cross: then a unit finds an argument without data, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from ...ir.errors import CutError
from ...ir.stages import StageGraph
from ...ir.user_code import at, raised_at
from ..job import Job
from ..random import seeded
from ..tensors import tensors_of
from .absent import (
    KEEP_TOGETHER,
    MissingValue,
    call_without_data,
    constant_leaves,
    has_no_data,
    missing_in,
    refuse_absent_inside,
    sendable_leaf,
)
from .containers import changed, handed_over
from .intercept import InterceptedForward, call_name
from .ops import ModuleOp
from .path import PATH_PREFIX, ForwardPath
from .record import LOSS, RecordedRun, UnitCall
from .skeleton import ModuleUnit, Skeleton
from .torch_functions import (
    LIKE,
    PLACES,
    RANDOM,
    READS,
    SILENT,
    count_numbers,
    python_value,
    read_numbers,
)


@dataclass(frozen=True, kw_only=True)
class CallPlace:
    """A unit call as seen by a stage.

    position: of the call in the recorded run; one that was not recorded counts with those of its op.
    call: the recorded call, if there is one.  runs_here: whether this stage runs it.
    random: it draws random numbers.
    """

    position: int
    call: UnitCall | None
    runs_here: bool
    random: bool


@dataclass(frozen=True, kw_only=True)
class StopPoint:
    """Where a stage stops: at the first unit call behind its last one, at position `last`.

    arguments: of that call, by leaf.
    """

    last: int
    arguments: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTask:
    """One stage of a cut.

    module_ops: all ops.  own_ops: numbers of this stage's.
    sends: names of values that it sends, without those that carry paths.
    stop: where it stops.  sources: stage -> where that stops, for stages that it receives from.
    units: all, in the order of their numbers in a path.
    """

    stage: int
    recording: RecordedRun
    module_ops: Sequence[ModuleOp]
    own_ops: frozenset[int]
    has_other_stages: bool
    makes_loss: bool
    sends: frozenset[str]
    stop: StopPoint
    sources: Mapping[int, StopPoint]
    units: tuple[str, ...]

    def before(self) -> StageTask:
        """The same run, ended where this stage's own modules would start."""
        first = min(call for index in self.own_ops for call in self.module_ops[index].calls)
        return replace(
            self,
            own_ops=frozenset(),
            makes_loss=False,
            sends=frozenset(),
            sources={},
            stop=StopPoint(last=first - 1, arguments={}),
        )

    @cached_property
    def random(self) -> frozenset[str]:
        return RANDOM | self.recording.random

    def place(self, unit: str, number: int) -> CallPlace:
        key = unit, number
        if key not in self._places:
            self._places[key] = self._locate(unit, number)
        return self._places[key]

    @cached_property
    def _places(self) -> dict[tuple[str, int], CallPlace]:
        return {}

    def _locate(self, unit: str, number: int) -> CallPlace:
        calls = [i for i, call in enumerate(self.recording.calls) if call.unit == unit]
        name = call_name(unit, number)
        exact = next((i for i in calls if self.recording.calls[i].name == name), None)
        position = exact if exact is not None else calls[-1] if calls else None
        if position is None:
            index = next(i for i, m in enumerate(self.module_ops) if unit in m.idle)
            position = self.module_ops[index].calls[0]
        else:
            index = next(i for i, m in enumerate(self.module_ops) if position in m.calls)
        random = any(self.recording.calls[i].random for i in calls) or not calls
        return CallPlace(
            position=position,
            call=None if exact is None else self.recording.calls[exact],
            runs_here=index in self.own_ops,
            random=random,
        )


def derive_stage_task(
    recording: RecordedRun,
    module_ops: Sequence[ModuleOp],
    units: tuple[str, ...],
    stages: StageGraph,
    index: int,
) -> StageTask:
    number = {module_op.name: i for i, module_op in enumerate(module_ops)}
    op_numbers = [frozenset(number[op] for op in stage.ops) for stage in stages.stages]
    sends = {c.value.name for c in stages.crossings if c.source == index}
    stops = [_stop_point(recording, [module_ops[i] for i in numbers]) for numbers in op_numbers]
    return StageTask(
        stage=index,
        recording=recording,
        module_ops=module_ops,
        own_ops=op_numbers[index],
        has_other_stages=len(stages.stages) > 1,
        makes_loss=index == stages.loss_stage,
        sends=frozenset(n for n in sends if not n.startswith(PATH_PREFIX) and n != LOSS),
        stop=stops[index],
        sources={s: stops[s] for s in stages.predecessors[index]},
        units=units,
    )


def _stop_point(recording: RecordedRun, module_ops: Sequence[ModuleOp]) -> StopPoint:
    last = max(call for module_op in module_ops for call in module_op.calls)
    behind = recording.calls[last + 1].arguments if last + 1 < len(recording.calls) else {}
    return StopPoint(last=last, arguments=behind)


class _Stop(BaseException):
    """Everything that the stage runs has run. Not an Exception, so that user code does not catch it."""


class StageRun(InterceptedForward):
    """A run of one stage on one micro-batch.

    received: values by name.  earlier_path: the way that earlier stages took.  device: where tensors are.

    bound: what it makes for other stages.  made_loss: the loss, if it makes that.
    path: the way up to where it stopped.
    bound_inputs: received values that stand for a tensor of this run by now.
    resolved: tensor without data -> the received one that it stands for.
    overwritten: storages with new content that is on another stage.
    stages_passed: stages we receive from that have stopped where this run is.
    versions: of bound values, their version counter then.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        task: StageTask,
        *,
        received: Mapping[str, Tensor],
        earlier_path: ForwardPath,
        seed: int,
        device: torch.device,
        training: bool = True,
    ) -> None:
        super().__init__(skeleton, seed, random=task.random, python_random=task.recording.python_random)
        self.task = task
        self.received = received
        self.earlier_path = earlier_path
        self.device = device
        self.training = training
        self.bound: dict[str, Tensor] = {}
        self.made_loss: Tensor | None = None
        self.path = ForwardPath()
        self.bound_inputs: set[str] = set()
        self.resolved: Any = WeakTensorKeyDictionary()
        self.overwritten: dict[int, Tensor] = {}
        self.stages_passed: set[int] = set()
        self.versions: dict[str, int] = {}

    def run(self, job: Job, batch: Mapping[str, Tensor]) -> None:
        """Run the stage's part. State has been put into the skeleton."""
        with suppress(_Stop):
            loss = self.loss(job, batch)
            if self.task.makes_loss:
                self.made_loss = self._data(loss, "the loss")
        for name, tensor in self.bound.items():
            if tensor._version != self.versions[name]:
                raise CutError(f"{name} is sent, and changed in place later", hint=KEEP_TOGETHER)

    def checkpoint(self, apply: Any, args: tuple[Any, ...]) -> Any:
        run, preserve, *arguments = args
        with self._passing():
            leaves, spec = tree_flatten(arguments)
            if (unit := self._unit_of(run)) is not None:  # it is called with what crosses as its arguments
                self._bind_arguments(self.task.place(unit.fqn, self.counts[unit.fqn]), leaves)
            leaves = [self._resolve(leaf) for leaf in leaves]
            here = not any(self._absent(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        arguments = tree_unflatten(leaves, spec)
        if here and missing_in(leaves) is None:
            return super().checkpoint(apply, (run, preserve, *arguments))
        return run(*arguments)  # what another stage checkpoints is no concern of this one

    def after(self, job: Job, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if not self.task.makes_loss:
            raise _Stop
        return super().after(job, outputs, batch)

    # --- data or not ------------------------------------------------------------------------------

    def _absent(self, tensor: Tensor) -> bool:
        if has_no_data(tensor):
            return True
        return bool(self.overwritten) and tensor.untyped_storage()._cdata in self.overwritten

    def _resolve(self, leaf: Any) -> Any:
        """What a tensor stands for by now."""
        if isinstance(leaf, Tensor):
            return self.resolved.get(leaf, leaf)
        return leaf

    def _mark_overwritten(self, tensor: Tensor) -> None:
        """A tensor has new content that is on another stage."""
        if not has_no_data(tensor):
            self.overwritten[tensor.untyped_storage()._cdata] = tensor

    def _data(self, leaf: Any, what: str) -> Tensor:
        """A tensor that must be there. Raises: CutError if it is not."""
        leaf = self._resolve(leaf)
        if isinstance(leaf, Tensor) and not self._absent(leaf):
            return leaf
        why = (
            leaf._what
            if isinstance(leaf, MissingValue)
            else "the forward took another way than when captured"
        )
        raise CutError(
            f"stage {self.task.stage} needs {what}, made on another stage and not sent: {why}",
            hint=KEEP_TOGETHER,
        )

    # --- functions of the glue --------------------------------------------------------------------

    def function(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.resolved:
            args, kwargs = tree_map(self._resolve, (args, kwargs))
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        absent = any(self._absent(t) for t in tensors)
        missing = missing_in(leaves)
        if name in READS and tensors:
            return self._read(function, name, args, kwargs, absent=absent or missing is not None)
        if missing is not None:
            return self._count(missing, [])
        if absent and name in SILENT:
            return MissingValue(f"the result of {name}")
        if not absent:
            return self._compute(function, name, args, kwargs, tensors)
        if name in PLACES:
            return function(torch.empty(0, device=self.device))
        if name in LIKE and tensors[0] is args[0] and not any(self._absent(t) for t in tensors[1:]):
            stand_in = torch.empty((), dtype=args[0].dtype, device=self.device).expand(args[0].shape)
            return self._compute(function, name, (stand_in, *args[1:]), kwargs, [])
        result, changed = call_without_data(function, name, args, kwargs, self._decided)
        for tensor in changed:
            self._mark_overwritten(tensor)
        return self._count(result, changed)

    def _compute(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Run a function whose data is all here."""
        versions = [t._version for t in tensors]
        place = f"{self.stretch}/{self.index}"
        with seeded(self.seed, place) if name in self.random else nullcontext():
            result = function(*args, **kwargs)
        changed = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        return self._count(result, changed)

    def _count(self, result: Any, changed: list[Tensor]) -> Any:
        """Random functions are seeded by how many made or changed tensors before them."""
        if changed or any(isinstance(leaf, (Tensor, MissingValue)) for leaf in tree_leaves(result)):
            self.index += 1
        return result

    def _bind(self, name: str, leaf: Any) -> Any:
        """A tensor that may cross has been made, here or on another stage."""
        if name in self.received:
            self.bound_inputs.add(name)
            if isinstance(leaf, Tensor):
                self.resolved[leaf] = self.received[name]
            return self.received[name]
        if name in self.task.sends:
            tensor = self._data(leaf, name)
            # what is sent is what it is now
            tensor = tensor.clone() if name in self.task.recording.changed_later else tensor
            self.bound[name] = tensor
            self.versions[name] = tensor._version
        return leaf

    def _read(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, absent: bool
    ) -> Any:
        """Decide as earlier stages did; what they have not decided is decided here."""
        decisions = self.path.decisions
        tensor = tensors_of((args, kwargs))[0]
        count = count_numbers(name, tensor)
        if absent or len(decisions) + count <= len(self.earlier_path.decisions):
            return python_value(name, [self._decided() for _ in range(count)], tensor)
        result = function(*args, **kwargs)
        decisions += read_numbers(result)
        return result

    def _decided(self) -> float:
        """The number that an earlier stage read here. Raises: CutError if none did."""
        decisions = self.path.decisions
        if len(decisions) == len(self.earlier_path.decisions):
            where = f"after {self.stretch}" if self.stretch else "at its start"
            raise CutError(
                f"stage {self.task.stage} must decide on data of another stage {where} of the forward, which "
                "did not decide there when captured",
                hint=KEEP_TOGETHER,
            )
        decisions.append(self.earlier_path.decisions[len(decisions)])
        return decisions[-1]

    # --- units ------------------------------------------------------------------------------------

    def call(self, unit: ModuleUnit, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self.task.place(unit.fqn, number)
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [self._resolve(leaf) for leaf in leaves]
        self._bind_arguments(place, leaves)
        leaves = [self._resolve(leaf) for leaf in leaves]
        if not place.runs_here and place.position > self.task.stop.last:
            self._bind_all(self.task.stop.arguments, leaves)
            self._note_call(unit)  # so that the next stage can see that it takes the same way
            raise _Stop
        self._note_call(unit)
        name = call_name(unit.fqn, number)
        call = place.call if self.training else self.task.recording.evaluation_calls.get(name, place.call)
        if place.runs_here:
            return self._run(unit, name, replace(place, call=call), leaves, spec, (args, kwargs))
        if call is None:
            return MissingValue(f"the result of {name}, which was not called when captured", self._decided)
        result = self._stub(unit, call, leaves)
        return handed_over(result, (args, kwargs)) if call.fills else result

    def _bind_arguments(self, place: CallPlace, leaves: list[Any]) -> None:
        """Bind what crosses as an argument of this call: as recorded, and where a stage that we receive from
        has stopped, whichever call this is."""
        for stage, entry in self.task.sources.items():
            if stage not in self.stages_passed and place.position > entry.last:
                self.stages_passed.add(stage)
                self._bind_all(entry.arguments, leaves)
        if place.call is not None:
            self._bind_all(place.call.arguments, leaves)

    def _bind_all(self, names: Mapping[int, str], leaves: list[Any]) -> None:
        for index, name in names.items():
            done = name in self.bound_inputs or name in self.bound
            if not done and index < len(leaves) and isinstance(leaves[index], (Tensor, MissingValue)):
                leaves[index] = self._bind(name, leaves[index])

    def _note_call(self, unit: ModuleUnit) -> None:
        """Note a call. Raises: CutError if earlier stages called another unit here."""
        calls, earlier = self.path.calls, self.earlier_path.calls
        number = self.task.units.index(unit.fqn)
        if len(calls) < len(earlier) and earlier[len(calls)] != number:
            raise CutError(
                f"stage {self.task.stage} calls {unit.fqn} where earlier stages called "
                f"{self.task.units[earlier[len(calls)]]}: the forward decides on what only some stages know",
                hint="decide on tensors, or on random numbers of torch, Python or NumPy's global generator",
            )
        calls.append(number)

    def _run(
        self, unit: ModuleUnit, name: str, place: CallPlace, leaves: list[Any], spec: TreeSpec, given: Any
    ) -> Any:
        """Run one of the stage's own units. name: of the call.  given: what it is called with."""
        what = f"an argument of {unit.fqn}"
        arguments = [
            self._data(leaf, what) if isinstance(leaf, (Tensor, MissingValue)) else leaf for leaf in leaves
        ]
        refuse_absent_inside(arguments, unit.fqn)
        args, kwargs = tree_unflatten(arguments, spec)
        with seeded(self.seed, name) if place.random else nullcontext():
            result = unit.original_forward(*args, **kwargs)
        if fills := changed(arguments, spec, (args, kwargs)):
            result = result, (args, kwargs)
        if place.call is not None:
            self._bind_outputs(unit, place.call, arguments, result, fills=fills)
        return handed_over(result, given) if fills else result

    def _bind_outputs(
        self, unit: ModuleUnit, call: UnitCall, arguments: list[Any], result: Any, *, fills: bool
    ) -> None:
        flat, spec = tree_flatten(result)
        filled, then = spec if fills else None, call.spec if call.fills else None
        if self.task.has_other_stages and filled != then:
            raise CutError(
                f"{unit.fqn} changes lists or dictionaries that it is called with otherwise than when "
                "captured: other stages cannot know",
                hint="return a tensor instead, or keep the module and what uses its result in one stage",
            )
        now, captured = constant_leaves(flat), constant_leaves(call.leaves)
        if self.task.has_other_stages and now != captured:
            raise CutError(
                f"{unit.fqn} returned {now}, and {captured} when captured: other stages cannot know",
                hint="return a tensor instead, or keep the module and what uses its result in one stage",
            )
        for output in call.outputs:
            if output.kind == "result" and output.index < len(flat):
                self._bind(output.name, flat[output.index])
            elif output.kind == "argument":
                self._bind(output.name, arguments[output.index])
            elif output.kind == "attribute":
                owner = unit.module.get_submodule(output.module)
                self._bind(output.name, getattr(owner, output.attribute))

    def _stub(self, unit: ModuleUnit, call: UnitCall, leaves: list[Any]) -> Any:
        """What another stage's unit gives."""
        flat = [sendable_leaf(leaf, unit.fqn) for leaf in call.leaves]
        for output in call.outputs:
            if output.kind == "same":
                flat[output.index] = leaves[output.argument]
            elif output.kind == "argument":
                target = leaves[output.index]
                if isinstance(target, Tensor):
                    self._mark_overwritten(target)
                    self._bind(output.name, target)
            else:
                shape = self.task.recording.values[output.name]
                tensor = torch.empty(shape.shape, dtype=getattr(torch, shape.dtype), device="meta")
                tensor = self._bind(output.name, tensor)
                if output.kind == "result":
                    flat[output.index] = tensor
                else:
                    setattr(unit.module.get_submodule(output.module), output.attribute, tensor)
        return tree_unflatten([self._resolve(leaf) for leaf in flat], call.spec)


_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What code raises that was given something else than a tensor, or one without data."""


@contextmanager
def lack_of_data_explained(task: StageTask) -> Iterator[None]:
    """Errors of the code between modules are named with its line; those of modules that the stage runs pass,
    as do all of the first stage, in front of which nothing is missing.

    Raises: CutError
    """
    try:
        yield
    except CutError as error:
        if "(" not in error.message and (where := raised_at(error)):
            raise CutError(f"{error.message} ({where})", hint=error.hint) from error
        raise
    except _RAISED as error:
        if 0 in task.own_ops or _in_a_module(error):
            raise
        where = at(raised_at(error))
        clear_frames(error.__traceback__)  # they hold tensors
        text = (str(error).strip() or "no message").splitlines()[0]
        raise CutError(
            f"stage {task.stage} runs the code between modules without the data of other stages, and it "
            f"fails{where}: {type(error).__name__}: {text}",
            hint=KEEP_TOGETHER,
        ) from error


def _in_a_module(error: BaseException) -> bool:
    """Whether an error came out of one of the stage's own modules."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not StageRun._run.__code__:
        trace = trace.tb_next
    return trace is not None
