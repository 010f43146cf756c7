"""What happened in one recorded run of a forward. Data only; `recorded_ops` makes ops of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec

from ...ir.graph import Value
from ..parameter_changes import ParameterWatch
from .intercepted_forward import START

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
