"""What happens to residuals between forward and backward.

A residual is a tensor that a stage's forward leaves for its backward. Its name says which op of the OpGraph
made it, so that a planner can name it without tracing the stage:

    relu_1      the output of op relu_1; of an op with several outputs the first
    topk.1      the second output that the graph lists for op topk, and so on
    gelu.1      of an op with one output, what else it made: statistics, masks, probabilities, copies of its
                inputs. They are numbered in the order in which the kernels make them, from the number of
                its outputs on.

What the profile says an op `saves` are values; each is the residual that `residual_names` gives, of the
bytes of the value. The profile's `extra_saved_bytes` of an op are those numbered behind its outputs, all of
them together. A saved value that the stage received, or that is a batch input, is no residual: it lies in its
message's buffer until the backward, and no policy moves it. `tests/tracer/test_residuals.py` holds the
stage functions to this for the model families, and lists the ops for which a profile says something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from .errors import PlanError, did_you_mean
from .graph import OpGraph

Treatment = Literal["keep", "recompute", "offload"]

TREATMENTS: Mapping[str, tuple[Treatment, ...]] = {
    "none": (),
    "recompute": ("recompute",),
    "offload": ("offload",),
    "both": ("recompute", "offload"),
}
"""What may be done with residuals, by the names that commands and configs have for it."""


AT_ONCE, LEAST_AT_ONCE = 3, 2
"""Micro-batches of a stage with all their residuals on the device, where it offloads some: the newest, the
one before it while it leaves, and the one whose backward is next; or the newest waits for the one before."""


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """For each stage: residual name -> treatment. What is not named is kept.

    ahead: stages that recompute in an action of their own in front of the backward, while its gradient is on
    the way, and then hold all that one micro-batch recomputes at once. Other stages recompute inside the
    backward, each residual in front of the first op that reads it.
    at_once: micro-batches of a stage that may have their offloaded residuals on the device at the same time;
    where the schedule says when they are copied, it decides.
    """

    stages: tuple[Mapping[str, Treatment], ...] = field(default=())
    ahead: tuple[int, ...] = ()
    at_once: int = AT_ONCE

    def __post_init__(self) -> None:
        known = get_args(Treatment)
        for stage, treatments in enumerate(self.stages):
            for name, given in treatments.items():
                if given not in known:
                    raise PlanError(
                        f"residual {name} of stage {stage} is treated as {given!r}",
                        hint=did_you_mean(str(given), known, f"use {', '.join(known)}"),
                    )
        if self.at_once < LEAST_AT_ONCE:
            raise PlanError(
                f"{self.at_once} micro-batches of a stage may have offloaded residuals on the device",
                hint=f"at least {LEAST_AT_ONCE} do: one leaves while another one is used",
            )
        for stage in self.ahead:
            if stage < 0:
                raise PlanError(f"stage {stage} is to recompute ahead", hint="stages count from 0")

    def require_stages(self, count: int) -> None:
        last = max(len(self.stages) - 1, *self.ahead, -1)
        if last >= count:
            what = "recompute ahead in" if last in self.ahead else "treat residuals of"
            raise PlanError(
                f"the memory policy is to {what} stage {last}, but the plan has {count} stages",
                hint=f"stages count from 0: leave out what it says about stages from {count} on",
            )

    def of_stage(self, stage: int) -> Mapping[str, Treatment]:
        return self.stages[stage] if stage < len(self.stages) else {}

    @property
    def offloads(self) -> bool:
        return any("offload" in stage.values() for stage in self.stages)

    def treated(self, stage: int, treatment: Treatment) -> frozenset[str]:
        """The residuals of a stage that are treated so, of those that are named.

        >>> sorted(MemoryPolicy(stages=({"relu": "recompute", "mm": "keep"},)).treated(0, "recompute"))
        ['relu']
        """
        return frozenset(name for name, given in self.of_stage(stage).items() if given == treatment)


KEEP_ALL = MemoryPolicy()


def residual_names(graph: OpGraph) -> dict[str, str]:
    """Value -> the name of the residual that it is where the forward keeps it.

    Left out is what may be a tensor of its own or share another one's storage, depending on the cut: a
    reshape that had to copy, and the results of `broadcast_tensors`.
    """
    return {
        value.name: f"{op.name}.{place}" if place else op.name
        for op in graph.ops
        if op.view or op.target not in _DEPENDS_ON_THE_CUT
        for place, value in enumerate(op.outputs)
    }


_DEPENDS_ON_THE_CUT = ("aten.reshape.default", "aten.broadcast_tensors.default")


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What can be done with one residual of a stage, as its traced graph has it.

    bytes: on the device.  ops: those that run again to make it from `sources`: other residuals, and values
    that the stage receives or batch inputs as `input:NAME`; from then on these are kept for it.
    obstacle: why it cannot be made again, or "" if it can. For several residuals their ops and sources are
    those of each together: a chain ends at any residual, whether it is there or made by a chain of its own.
    """

    name: str
    bytes: int
    ops: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    obstacle: str = ""
