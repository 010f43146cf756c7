"""A recorded run -> ops: what each op reads from others.

Values cross at the edges of units only: what a unit call returns, and what the next one is called with, if
it can be made where the one before it runs, as `x + block(x)` can. All other glue (masks, positions, sums of
independent branches) is run again, from those, by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...ir.errors import CutError
from ...ir.graph import Op, Value
from .absent import KEEP_TOGETHER
from .path import PATH_PREFIX, SPARE
from .record import LOSS, RecordedRun, SameStage, is_source
from .skeleton import Skeleton


@dataclass(eq=False)
class ModuleOp:
    """What goes into an op. calls: numbers of unit calls.  idle: units that the recorded run did not call."""

    name: str
    calls: list[int] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    params: dict[str, None] = field(default_factory=dict)
    buffers: dict[str, None] = field(default_factory=dict)
    updates: dict[str, None] = field(default_factory=dict)


def is_dynamic(recording: RecordedRun, module_ops: Sequence[ModuleOp]) -> bool:
    """Whether the forward may take another way between units than it took when recorded."""
    return bool(recording.decisions) or recording.python_random or any(m.idle for m in module_ops)


def build_ops(
    recording: RecordedRun,
    skeleton: Skeleton,
    groups: Sequence[Sequence[str]] | None,
    together: Sequence[SameStage] = (),
) -> OpBuilder:
    """Ops of a recorded run, such that any cut between them can run.

    groups: lists of units that form one op each, or None for one op per call.  together: calls that form one
        op in any case.
    Raises: CutError if groups tear apart what must stay together.
    """
    joined = list(together)
    while True:
        builder = OpBuilder(recording, skeleton, groups, joined)
        torn = [
            same
            for same in builder.same_stage()
            if len({id(builder.op_of_call[call]) for call in range(same.first, same.last + 1)}) > 1
        ]
        if not torn:
            return builder
        if groups is not None:
            first, last, why = torn[0]
            a, b = recording.calls[first].name, recording.calls[last].name
            raise CutError(f"Job.modules puts {a} and {b} into two stages, but {why}", hint=KEEP_TOGETHER)
        joined += torn


class OpBuilder:
    """Ops of a recorded run. joined: what is one op though it is several calls."""

    def __init__(
        self,
        recording: RecordedRun,
        skeleton: Skeleton,
        groups: Sequence[Sequence[str]] | None,
        joined: Sequence[SameStage],
    ) -> None:
        self.recording = recording
        self.skeleton = skeleton
        self.last = len(recording.calls) - 1
        self.maker = {output.name: i for i, call in enumerate(recording.calls) for output in call.outputs}
        self.maker |= {name: i - 1 for i, call in enumerate(recording.calls) for name in call.made_of}
        self.module_ops = self._ops_of_lists(groups) if groups is not None else self._ops_of_calls(joined)
        self.op_of_call = {call: m for m in self.module_ops for call in m.calls}
        self._trace_inputs()
        for module_op in self.module_ops:
            for unit in (*(recording.calls[c].unit for c in module_op.calls), *module_op.idle):
                for name in self.skeleton.below(unit):
                    (module_op.params if name in skeleton.params else module_op.buffers)[name] = None
        self._set_outputs()

    def same_stage(self) -> Iterator[SameStage]:
        """Calls that must stay together: as recorded, and as follows from what the ops read."""
        for first, last, why in self.recording.same_stage:
            yield SameStage(first, self.last if last < 0 else last, why)
        for module_op in self.module_ops:
            for name in module_op.inputs:
                for names, why in (
                    (self.recording.stale, f"{name} is changed in place through a view"),
                    (self.recording.data_sized, f"the size of {name} depends on data"),
                ):
                    if name in names and (source := self._maker_op(name)) is not None:
                        yield SameStage(source.calls[0], module_op.calls[-1], why)
            if not module_op.outputs:
                index = module_op.calls[-1]
                yield SameStage(index, min(index + 1, self.last), f"nothing uses {module_op.name}")

    def _maker_op(self, name: str) -> ModuleOp | None:
        """The op that makes a value; None for a batch input."""
        return self.op_of_call[self.maker[name]] if name in self.maker else None

    # --- module_ops ----------------------------------------------------------------------------------

    def _ops_of_calls(self, joined: Sequence[SameStage]) -> list[ModuleOp]:
        calls = self.recording.calls
        module_ops: list[ModuleOp] = []
        for index, call in enumerate(calls):
            if any(first < index <= last for first, last, _ in joined):
                module_ops[-1].calls.append(index)
                module_ops[-1].name = f"{calls[module_ops[-1].calls[0]].name}...{call.name}"
            else:
                module_ops.append(ModuleOp(name=call.name, calls=[index]))
        self._place_idle(module_ops)
        return module_ops

    def _ops_of_lists(self, groups: Sequence[Sequence[str]]) -> list[ModuleOp]:
        calls = self.recording.calls
        module_ops: list[ModuleOp] = []
        for units in groups:
            numbers = [i for i, call in enumerate(calls) if call.unit in units]
            if not numbers:
                raise CutError(
                    f"the forward calls none of {', '.join(units)}, which Job.modules puts into one stage",
                    hint="put them into the list of a module that is called",
                )
            idle = [u for u in units if not any(calls[i].unit == u for i in numbers)]
            named = units if len(units) <= 2 else (units[0], "...", units[-1])
            module_ops.append(ModuleOp(name="+".join(named), calls=numbers, idle=idle))
        return module_ops

    def _place_idle(self, module_ops: list[ModuleOp]) -> None:
        """A unit that was not called goes with the one registered before it, or else after it."""
        home: ModuleOp | None = None
        waiting: list[str] = []
        for fqn in self.skeleton.units:
            of_unit = [m for m in module_ops if any(self.recording.calls[c].unit == fqn for c in m.calls)]
            if of_unit:
                home = of_unit[0]
                home.idle += waiting
                waiting = []
            elif home is not None:
                home.idle.append(fqn)
            else:
                waiting.append(fqn)

    # --- what an op reads -------------------------------------------------------------------------

    def _trace_inputs(self) -> None:
        for index, call in enumerate(self.recording.calls):
            module_op = self.op_of_call[index]
            module_op.updates |= dict.fromkeys(call.updates)
            self._read(module_op, call.others.reads)
            for name, origins in call.made_of.items():
                self._read(self.op_of_call[index - 1], origins.reads)
                self._read(module_op, [name])
        for effect in self.recording.effects:
            module_op = self.op_of_call[max(effect.call, 0)]
            module_op.updates |= dict.fromkeys(effect.updates)
            self._read(module_op, effect.reads)
        self._read(self.op_of_call[self.last], self.recording.loss.reads)

    def _read(self, module_op: ModuleOp, names: Iterable[str]) -> None:
        for name in sorted(names):
            if is_source(name):
                kind, _, target = name.partition(":")
                of_kind = {"param": module_op.params, "buffer": module_op.buffers, "batch": module_op.inputs}
                of_kind[kind][target] = None
            elif self._maker_op(name) is not module_op:
                module_op.inputs[name] = None

    def _set_outputs(self) -> None:
        """Outputs of ops: what others read, the loss, and what was decided."""
        for module_op in self.module_ops:
            for name in module_op.inputs:
                if (source := self._maker_op(name)) is not None:
                    source.outputs[name] = None
        for before, after in zip(self.module_ops, self.module_ops[1:], strict=False):
            if is_dynamic(self.recording, self.module_ops):
                before.outputs[PATH_PREFIX + before.name] = None
                after.inputs[PATH_PREFIX + before.name] = None
        self.op_of_call[self.last].outputs[LOSS] = None

    def reached(self) -> set[str]:
        """Parameters that may get a gradient: where the way is fixed, those that the loss depends on."""
        trainable = {name for name in self.skeleton.params if self.skeleton.resting(name).requires_grad}
        if is_dynamic(self.recording, self.module_ops):
            return trainable
        reached: set[str] = set()
        needed, values = set(self.recording.loss.flows), self.recording.values
        for call in reversed(self.recording.calls):
            if any(output.name in needed and values[output.name].needs_grad for output in call.outputs):
                needed |= call.others.flows | call.made_of.keys()
                reached.update(self.skeleton.below(call.unit))
            for name, origins in call.made_of.items():
                if name in needed and values[name].needs_grad:
                    needed |= origins.flows
        reached |= {name.removeprefix("param:") for name in needed if name.startswith("param:")}
        return reached & trainable

    # --- the result -------------------------------------------------------------------------------

    def ops(self) -> tuple[Op, ...]:
        done: set[str] = set()
        ops = []
        for module_op in self.module_ops:
            late = [n for n in module_op.inputs if n in self.maker and n not in done]
            if late:
                made_by = self.recording.calls[self.maker[late[0]]].name
                raise CutError(
                    f"{module_op.name} reads what {made_by} makes, which is in a later list of Job.modules",
                    hint="order the lists as the forward calls the modules, and keep loops in one list",
                )
            done |= module_op.outputs.keys()
            ops.append(self._op(module_op))
        return tuple(ops)

    def _op(self, module_op: ModuleOp) -> Op:
        calls = [self.recording.calls[i] for i in module_op.calls]
        units = list(dict.fromkeys([*(c.unit for c in calls), *module_op.idle]))
        random = any(c.random for c in calls) or not self.recording.drew_after.isdisjoint(module_op.calls)
        modules = [self.skeleton.units[unit].module for unit in units]
        return Op(
            name=module_op.name,
            target=f"module:{units[0]}" if len(units) == 1 else f"modules:{','.join(units)}",
            inputs=tuple(module_op.inputs),
            outputs=tuple(self._value(name) for name in module_op.outputs),
            params=tuple(module_op.params),
            buffers=tuple(module_op.buffers),
            updates=tuple(module_op.updates),
            attributes="; ".join(" ".join(str(module).split()) for module in modules),
            module=units[0],
            random=random,
        )

    def _value(self, name: str) -> Value:
        if name.startswith(PATH_PREFIX):
            size = 2 * (len(self.recording.decisions) + len(self.recording.calls)) + SPARE
            return Value(name=name, shape=(size,), dtype="float64")
        return self.recording.values[name]
