"""What one stage has to do in a run of the forward, worked out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...ir.stages import StageGraph
from .forward_path import PATH_PREFIX
from .intercepted_forward import call_name
from .recorded_ops import ModuleOp, is_dynamic
from .recorded_run import LOSS, RecordedRun, UnitCall
from .torch_functions import RANDOM


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
    """Where a stage stops: at the first unit call behind `last`. arguments: of that call, by leaf."""

    last: int
    arguments: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTask:
    """One stage of a cut.

    module_ops: all ops.  own_ops: numbers of this stage's.
    sends, receives: names of values that cross, without those that carry paths.
    stop: where it stops.  sources: stage -> where that stops, for stages that it receives from.
    source_of: received value -> stage.  units: all, in the order of their numbers in a path.
    """

    stage: int
    recording: RecordedRun
    module_ops: Sequence[ModuleOp]
    own_ops: frozenset[int]
    has_other_stages: bool
    makes_loss: bool
    sends: frozenset[str]
    receives: frozenset[str]
    stop: StopPoint
    sources: Mapping[int, StopPoint]
    source_of: Mapping[str, int]
    units: tuple[str, ...]

    @cached_property
    def dynamic(self) -> bool:
        """Whether the forward may call other units than recorded."""
        return is_dynamic(self.recording, self.module_ops)

    def made_at(self, name: str) -> int:
        """Number of the recorded unit call that makes a value, or in whose stretch it is made; -1 before."""
        return self._made_at[name]

    @cached_property
    def _made_at(self) -> Mapping[str, int]:
        return {name: step.call for step in self.recording.steps for name in step.outputs}

    @property
    def last(self) -> int:
        """Position of the last recorded call of this stage."""
        return self.stop.last

    def before(self) -> StageTask:
        """The same run, ended where this stage's own modules would start."""
        first = min(call for index in self.own_ops for call in self.module_ops[index].calls)
        nothing: frozenset[str] = frozenset()
        return replace(
            self,
            own_ops=frozenset(),
            makes_loss=False,
            sends=nothing,
            receives=nothing,
            sources={},
            stop=StopPoint(last=first - 1, arguments={}),
        )

    @cached_property
    def random(self) -> frozenset[str]:
        return RANDOM | self.recording.random

    @cached_property
    def stretches(self) -> frozenset[str]:
        """Stretches of glue in which something that crosses is made."""
        return frozenset(name.partition("/")[0] for name in self.sends | self.receives if "/" in name)

    def stretch(self, name: str) -> Sequence[str]:
        """Functions that the glue called after a unit call in the recorded run."""
        return self._stretches.get(name, ())

    @cached_property
    def _stretches(self) -> Mapping[str, Sequence[str]]:
        return {"": self.recording.first_stretch} | {c.name: c.stretch for c in self.recording.calls}

    def place(self, unit: str, number: int) -> CallPlace:
        """Where a unit call belongs."""
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
    """The task of stage `index`."""
    number = {module_op.name: i for i, module_op in enumerate(module_ops)}
    op_numbers = [frozenset(number[op] for op in stage.ops) for stage in stages.stages]
    sends = {c.value.name for c in stages.crossings if c.source == index}
    receives = {c.value.name for c in stages.crossings if c.target == index}
    stops = [_stop_point(recording, [module_ops[i] for i in numbers]) for numbers in op_numbers]
    return StageTask(
        stage=index,
        recording=recording,
        module_ops=module_ops,
        own_ops=op_numbers[index],
        has_other_stages=len(stages.stages) > 1,
        makes_loss=index == stages.loss_stage,
        sends=frozenset(n for n in sends if not n.startswith(PATH_PREFIX) and n != LOSS),
        receives=frozenset(n for n in receives if not n.startswith(PATH_PREFIX)),
        stop=stops[index],
        sources={s: stops[s] for s in stages.predecessors[index]},
        source_of={c.value.name: c.source for c in stages.crossings if c.target == index},
        units=units,
    )


def _stop_point(recording: RecordedRun, module_ops: Sequence[ModuleOp]) -> StopPoint:
    last = max(call for module_op in module_ops for call in module_op.calls)
    behind = recording.calls[last + 1].inputs if last + 1 < len(recording.calls) else ()
    return StopPoint(last=last, arguments={i: name for i, name in enumerate(behind) if name})
