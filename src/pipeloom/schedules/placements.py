"""Placements: which rank runs which stage of a chain; and stage graphs with several directions."""

from __future__ import annotations

from dataclasses import replace

from ..ir.errors import ScheduleError
from ..ir.stages import Crossing, Stage, StageGraph


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod p.

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * chunks


def wave(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """There and back, `chunks` times in all; two are a V. Neighbours at a turn share a rank.

    >>> wave(3)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(ranks))
    return tuple(r for c in range(chunks) for r in (there if c % 2 == 0 else there[::-1]))


def both_ways(ranks: int) -> tuple[int, ...]:
    """Two replicas of a chain in opposite directions, for `replicate(chain, 2)`.

    >>> both_ways(2)
    (0, 1, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))


def replicate(stages: StageGraph, times: int = 2) -> StageGraph:
    """The same stages several times side by side, one graph: replica r of stage s is stage r * S + s.

    Each replica runs its own micro-batches, `microbatches` each. Every parameter is tied between the
    replicas, so that their gradients are summed before the step. The loss is the first replica's.
    """
    count = len(stages.stages)
    if times < 1:
        raise ScheduleError(f"{times} replicas", hint="use at least 1")

    def named(name: str, r: int) -> str:
        return name if r == 0 else f"{name}@{r}"

    copies = [
        Stage(
            index=r * count + s.index, ops=tuple(named(o, r) for o in s.ops),
            clones=tuple(named(o, r) for o in s.clones),
        )
        for r in range(times)
        for s in stages.stages
    ]  # fmt: skip
    crossings = [
        Crossing(
            value=replace(c.value, name=named(c.value.name, r)),
            source=r * count + c.source, target=r * count + c.target,
        )
        for r in range(times)
        for c in stages.crossings
    ]  # fmt: skip
    return StageGraph(
        stages=tuple(copies), crossings=tuple(crossings), params=stages.params * times,
        buffers=stages.buffers * times, inputs=stages.inputs * times, loss_stage=stages.loss_stage,
    )  # fmt: skip
