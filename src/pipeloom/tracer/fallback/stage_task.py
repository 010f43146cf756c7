"""What one stage has to do in a run of the forward, worked out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...ir.stages import StageGraph
from .forward_path import PATH
from .functions import RANDOM
from .intercepted_forward import call_name
from .recorded_ops import Member, is_dynamic
from .recorded_run import LOSS, Call, Course


@dataclass(frozen=True, kw_only=True)
class Place:
    """A unit call as seen by a stage.

    position: of the call in the recorded run; one that was not recorded counts with those of its op.
    call: the recorded call, if there is one.  own: this stage runs it.  random: it draws random numbers.
    """

    position: int
    call: Call | None
    own: bool
    random: bool


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a stage stops: at the first unit call behind `last`. arguments: of that call, by leaf."""

    last: int
    arguments: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One stage of a cut.

    members: all ops.  own: indices of this stage's.  sends, receives: names of values that cross, without
    those that carry paths.  sources: stage -> where it stops, for stages that it receives from.
    source_of: received value -> stage.  units: all, in the order of their numbers in a path.
    """

    stage: int
    course: Course
    members: Sequence[Member]
    own: frozenset[int]
    others: bool
    makes_loss: bool
    sends: frozenset[str]
    receives: frozenset[str]
    entry: Entry
    sources: Mapping[int, Entry]
    source_of: Mapping[str, int]
    units: tuple[str, ...]

    @cached_property
    def dynamic(self) -> bool:
        """Whether the forward may call other units than recorded."""
        return is_dynamic(self.course, self.members)

    def made_at(self, name: str) -> int:
        """Number of the recorded unit call that makes a value, or in whose stretch it is made; -1 before."""
        return self._made_at[name]

    @cached_property
    def _made_at(self) -> Mapping[str, int]:
        return {name: step.call for step in self.course.steps for name in step.outputs}

    @property
    def last(self) -> int:
        """Position of the last recorded call of this stage."""
        return self.entry.last

    def before(self) -> Task:
        """The same run, ended where this stage's own modules would start."""
        first = min(call for index in self.own for call in self.members[index].calls)
        nothing: frozenset[str] = frozenset()
        return replace(
            self,
            own=frozenset(),
            makes_loss=False,
            sends=nothing,
            receives=nothing,
            sources={},
            entry=Entry(last=first - 1, arguments={}),
        )

    @cached_property
    def random(self) -> frozenset[str]:
        return RANDOM | self.course.random

    @cached_property
    def stretches(self) -> frozenset[str]:
        """Stretches of glue in which something that crosses is made."""
        return frozenset(name.partition("/")[0] for name in self.sends | self.receives if "/" in name)

    def stretch(self, name: str) -> Sequence[str]:
        """Functions that the glue called after a unit call in the recorded run."""
        return self._stretches.get(name, ())

    @cached_property
    def _stretches(self) -> Mapping[str, Sequence[str]]:
        return {"": self.course.first_stretch} | {c.name: c.stretch for c in self.course.calls}

    def place(self, unit: str, number: int) -> Place:
        """Where a unit call belongs."""
        key = unit, number
        if key not in self._places:
            self._places[key] = self._find(unit, number)
        return self._places[key]

    @cached_property
    def _places(self) -> dict[tuple[str, int], Place]:
        return {}

    def _find(self, unit: str, number: int) -> Place:
        calls = [i for i, call in enumerate(self.course.calls) if call.unit == unit]
        name = call_name(unit, number)
        exact = next((i for i in calls if self.course.calls[i].name == name), None)
        position = exact if exact is not None else calls[-1] if calls else None
        if position is None:
            index = next(i for i, m in enumerate(self.members) if unit in m.idle)
            position = self.members[index].calls[0]
        else:
            index = next(i for i, m in enumerate(self.members) if position in m.calls)
        random = any(self.course.calls[i].random for i in calls) or not calls
        return Place(
            position=position,
            call=None if exact is None else self.course.calls[exact],
            own=index in self.own,
            random=random,
        )


def task_of(
    course: Course, members: Sequence[Member], units: tuple[str, ...], stages: StageGraph, index: int
) -> Task:
    """The task of stage `index`."""
    number = {member.name: i for i, member in enumerate(members)}
    own = [frozenset(number[op] for op in stage.ops) for stage in stages.stages]
    sends = {c.value.name for c in stages.crossings if c.source == index}
    receives = {c.value.name for c in stages.crossings if c.target == index}
    entries = [_entry(course, [members[i] for i in mine]) for mine in own]
    return Task(
        stage=index,
        course=course,
        members=members,
        own=own[index],
        others=len(stages.stages) > 1,
        makes_loss=index == stages.loss_stage,
        sends=frozenset(n for n in sends if not n.startswith(PATH) and n != LOSS),
        receives=frozenset(n for n in receives if not n.startswith(PATH)),
        entry=entries[index],
        sources={s: entries[s] for s in stages.predecessors[index]},
        source_of={c.value.name: c.source for c in stages.crossings if c.target == index},
        units=units,
    )


def _entry(course: Course, members: Sequence[Member]) -> Entry:
    last = max(call for member in members for call in member.calls)
    behind = course.calls[last + 1].inputs if last + 1 < len(course.calls) else ()
    return Entry(last=last, arguments={i: name for i, name in enumerate(behind) if name})
