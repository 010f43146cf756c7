"""A recorded course -> ops: which step belongs to which module, and what each op reads from others.

Glue is run where its data is. A step that needs results of units, or trainable parameters, belongs to the
unit it follows, if everything it reads is there; then what it makes can be sent, as `x + block(x)` is. All
other glue (masks, positions, sums of independent branches) is run again by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...ir.errors import CutError
from ...ir.graph import Op, Value
from .absent import KEEP_TOGETHER
from .course import LOSS, Course, Step, is_source
from .skeleton import Skeleton

PATH = "path:"
"""Prefix of values that carry what the forward has decided so far from one op to the next."""


@dataclass(eq=False)
class Member:
    """What goes into an op. calls: numbers of unit calls.  idle: units that the recorded run did not call."""

    name: str
    calls: list[int] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    params: dict[str, None] = field(default_factory=dict)
    buffers: dict[str, None] = field(default_factory=dict)
    updates: dict[str, None] = field(default_factory=dict)
    reads: bool = False


class Wiring:
    """Ops of a course.

    groups: lists of units that form one op each, or None for one op per call.
    """

    def __init__(
        self, course: Course, skeleton: Skeleton, groups: Sequence[Sequence[str]] | None
    ) -> None:
        self.course = course
        self.skeleton = skeleton
        self.maker = {name: i for i, step in enumerate(course.steps) for name in step.outputs}
        self.step_of = {s.call: i for i, s in enumerate(course.steps) if s.kind == "call"}
        self.called_by = self._dependencies()
        self.members = self._members(groups)
        self.member_of = {call: m for m in self.members for call in m.calls}
        self.owners = [self._owner(step, i) for i, step in enumerate(course.steps)]
        for index, owner in enumerate(self.owners):
            if owner is not None:
                self._collect(index, owner)
        for member in self.members:
            for unit in (*(course.calls[c].unit for c in member.calls), *member.idle):
                self._read_state(member, self.skeleton.below(unit))
        self._send()

    # --- who depends on which unit calls ----------------------------------------------------------

    def _dependencies(self) -> list[tuple[int, bool]]:
        """For each step: the calls it depends on, as bits, and whether it reads a trainable parameter."""
        found: list[tuple[int, bool]] = []
        for step in self.course.steps:
            calls, trained = (1 << step.call, True) if step.kind == "call" else (0, False)
            for name in step.inputs:
                if name in self.maker:
                    calls |= found[self.maker[name]][0]
                    trained = trained or found[self.maker[name]][1]
                elif name.startswith("param:"):
                    trained = trained or self.skeleton.resting(name.removeprefix("param:")).requires_grad
            found.append((calls, trained))
        return found

    def _owner(self, step: Step, index: int) -> Member | None:
        """The op that a step belongs to; None if whoever needs its results runs it again."""
        last = max(step.call, 0)
        if step.kind == "loss":
            return self.member_of[len(self.course.calls) - 1]
        if step.kind == "call" or step.read or step.updates:
            return self.member_of[last]
        calls, trained = self.called_by[index]
        if not calls:
            return self.member_of[last] if trained else None
        within = self.called_by[self.step_of[last]][0]
        return self.member_of[last] if calls & (1 << last) and not calls & ~within else None

    # --- members ----------------------------------------------------------------------------------

    def _members(self, groups: Sequence[Sequence[str]] | None) -> list[Member]:
        calls = self.course.calls
        if groups is None:
            members = [Member(name=call.name, calls=[i]) for i, call in enumerate(calls)]
            self._place_idle(members)
            return members
        members = []
        for units in groups:
            own = [i for i, call in enumerate(calls) if call.unit in units]
            if not own:
                raise CutError(
                    f"the forward calls none of {', '.join(units)}, which Job.modules puts into one stage",
                    hint="put them into the list of a module that is called",
                )
            idle = [u for u in units if not any(calls[i].unit == u for i in own)]
            members.append(Member(name="+".join(_short(units)), calls=own, idle=idle))
        return members

    def _place_idle(self, members: list[Member]) -> None:
        """A unit that was not called goes with the one registered before it, or else after it."""
        home: Member | None = None
        waiting: list[str] = []
        for fqn in self.skeleton.units:
            mine = [m for m in members if any(self.course.calls[c].unit == fqn for c in m.calls)]
            if mine:
                home = mine[0]
                home.idle += waiting
                waiting = []
            elif home is not None:
                home.idle.append(fqn)
            else:
                waiting.append(fqn)


    # --- what an op reads -------------------------------------------------------------------------

    def _collect(self, index: int, owner: Member) -> None:
        """Follow what a step reads back to values of other ops, parameters, buffers and the batch."""
        step = self.course.steps[index]
        owner.updates |= dict.fromkeys(step.updates)
        owner.reads = owner.reads or step.read
        pending, seen = list(step.inputs), set(step.inputs)
        while pending:
            name = pending.pop()
            if is_source(name):
                kind, _, target = name.partition(":")
                {"param": owner.params, "buffer": owner.buffers, "batch": owner.inputs}[kind][target] = None
                continue
            maker = self.maker[name]
            if self.owners[maker] is None:
                owner.updates |= dict.fromkeys(self.course.steps[maker].updates)
                more = [n for n in self.course.steps[maker].inputs if n not in seen]
                seen.update(more)
                pending += more
            elif self.owners[maker] is not owner:
                owner.inputs[name] = None

    def _read_state(self, member: Member, names: Iterable[str]) -> None:
        for name in names:
            (member.params if name in self.skeleton.params else member.buffers)[name] = None

    def _send(self) -> None:
        """Outputs of ops: what others read, the loss, and what was decided."""
        for member in self.members:
            for name in member.inputs:
                if name in self.maker:
                    source = self.owners[self.maker[name]]
                    assert source is not None
                    source.outputs[name] = None
        for before, after in zip(self.members, self.members[1:], strict=False):
            if any(m.reads for m in self.members):
                before.outputs[PATH + before.name] = None
                after.inputs[PATH + before.name] = None
        self.member_of[len(self.course.calls) - 1].outputs[LOSS] = None

    # --- the result -------------------------------------------------------------------------------

    def ops(self, path_numbers: int) -> tuple[Op, ...]:
        """The ops in order. path_numbers: how many decisions there is room for."""
        done: set[str] = set()
        found = []
        for member in self.members:
            late = [n for n in member.inputs if n in self.maker and n not in done]
            if late:
                raise CutError(
                    f"{member.name} reads {late[0]}, which a later list of Job.modules makes",
                    hint="order the lists as the forward calls the modules, and keep loops in one list",
                )
            done |= member.outputs.keys()
            found.append(self._op(member, path_numbers))
        return tuple(found)

    def _op(self, member: Member, path_numbers: int) -> Op:
        calls = [self.course.calls[i] for i in member.calls]
        units = list(dict.fromkeys([*(c.unit for c in calls), *member.idle]))
        random = any(c.random for c in calls) or any(
            name in self.course.random for c in calls for name in c.stretch
        )
        modules = [self.skeleton.units[unit].module for unit in units]
        return Op(
            name=member.name,
            target=f"module:{units[0]}" if len(units) == 1 else f"modules:{','.join(units)}",
            inputs=tuple(member.inputs),
            outputs=tuple(self._value(name, path_numbers) for name in member.outputs),
            params=tuple(member.params), buffers=tuple(member.buffers), updates=tuple(member.updates),
            attributes="; ".join(" ".join(str(module).split()) for module in modules),
            module=units[0], random=random,
        )  # fmt: skip

    def _value(self, name: str, path_numbers: int) -> Value:
        if name.startswith(PATH):
            return Value(name=name, shape=(path_numbers + 1,), dtype="float64")
        return self.course.values[name]


def _short(units: Sequence[str]) -> tuple[str, ...]:
    return tuple(units) if len(units) <= 2 else (units[0], "...", units[-1])


def refuse_unsendable(course: Course, sent: Iterable[str]) -> None:
    """Refuse what cannot be right once the model is cut.

    sent: names of values that cross.
    Raises: CutError
    """
    if course.hidden:
        raise CutError(
            f"the forward uses {course.hidden}, which other stages cannot see",
            hint="return the tensor from the module, or keep it in an attribute that is a tensor",
        )
    for name in sent:
        if name in course.stale:
            raise CutError(
                f"{name} would be sent to another stage, but is changed in place through a view of it",
                hint=KEEP_TOGETHER,
            )
