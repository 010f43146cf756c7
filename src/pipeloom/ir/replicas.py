"""Replicas: the same stages several times side by side, each with micro-batches of its own.

Bidirectional schedules run one replica in each direction. A step's micro-batches are dealt out in order:
with m for each replica, replica r runs numbers r * m to r * m + m - 1 as its micro-batches 0 to m - 1.
"""

from __future__ import annotations

from .errors import CutError, ScheduleError
from .stages import Crossing, Stage, StageGraph


def replicate(stages: StageGraph, times: int = 2) -> StageGraph:
    """One graph of all replicas: replica r of stage s is stage r * S + s, for S stages.

    Every parameter is tied between the replicas, so that their gradients are summed before the step.
    Values and ops keep their names: what is between two stages is the same in each replica.
    Raises: ScheduleError if `times` is not positive; CutError if the stages are replicas already.

    >>> from .stages import chain
    >>> both = replicate(chain(3))
    >>> both.successors[3], both.origin(4), both.number(4, 1, of=8)
    ((4,), 1, 9)
    """
    if times < 1:
        raise ScheduleError(f"{times} replicas", hint="use at least 1")
    if stages.replicas != 1:
        raise CutError("these stages are replicas already", hint="replicate the stages of one")
    if stages.shards:
        raise CutError("a stage on several ranks cannot be replicated", hint="place each stage on one rank")
    count = len(stages.stages)
    return StageGraph(
        stages=tuple(
            Stage(index=r * count + s.index, ops=s.ops, clones=s.clones)
            for r in range(times)
            for s in stages.stages
        ),
        crossings=tuple(
            Crossing(value=c.value, source=r * count + c.source, target=r * count + c.target)
            for r in range(times)
            for c in stages.crossings
        ),
        params=stages.params * times,
        buffers=stages.buffers * times,
        inputs=stages.inputs * times,
        loss_stage=stages.loss_stage,
        replicas=times,
    )
