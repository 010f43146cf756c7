"""Placements: which rank runs which stage; and stages that span several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from ...ir.errors import ScheduleError
from ...ir.graph import Value
from ...ir.stages import Crossing, StageGraph, replicate as replicate

RankTable: TypeAlias = Sequence[int | tuple[int, ...]]
"""Per stage its rank, or the ranks that it spans."""


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


def spread(
    stages: StageGraph, table: RankTable, *, shared: bool = True
) -> tuple[StageGraph, tuple[int, ...]]:
    """Stages that span several ranks, such as an expert-parallel or data-parallel one: a graph and a
    placement in which each rank of such a stage has a stage of its own, a shard.

    The first rank keeps the stage's number; shards for the others are numbered behind all stages, in order.
    They begin F, B and I together, and each sends its part of the outputs to all readers. shared: they hold
    the same parameters, whose gradients are summed before the step; else each has its own.

    Raises: ScheduleError if the table does not fit the stages, or a stage names a rank twice or none.

    >>> from pipeloom.ir.stages import chain
    >>> graph, placement = spread(chain(3), (0, (1, 2), 3))
    >>> placement, graph.shards, graph.successors[0], graph.predecessors[2]
    ((0, 1, 3, 2), ((1, 3),), (1, 3), (1, 3))
    """
    count = len(stages.stages)
    if stages.replicas != 1 or stages.shards:
        raise ScheduleError("these stages are replicas or shards already", hint="spread stages of a model")
    ranks = [entry if isinstance(entry, tuple) else (entry,) for entry in table]
    if len(ranks) != count:
        raise ScheduleError(f"a placement of {len(ranks)} stages, not {count}", hint="give one entry each")
    for stage, stage_ranks in enumerate(ranks):
        if not stage_ranks or len(set(stage_ranks)) < len(stage_ranks) or min(stage_ranks) < 0:
            raise ScheduleError(
                f"stage {stage} is placed on ranks {stage_ranks}",
                hint="name each of its ranks once, from 0 on",
            )
    shards: list[list[int]] = [[s] for s in range(count)]
    origin, placement = list(range(count)), [stage_ranks[0] for stage_ranks in ranks]
    for stage, stage_ranks in enumerate(ranks):
        for rank in stage_ranks[1:]:
            shards[stage].append(len(origin))
            origin.append(stage)
            placement.append(rank)
    crossings = tuple(
        Crossing(value=_part(c.value, len(shards[c.source])), source=source, target=target)
        for c in stages.crossings
        for source in shards[c.source]
        for target in shards[c.target]
    )
    names = [
        [f"{n}@{i}" if i >= count and not shared else n for n in stages.params[s]]
        for i, s in enumerate(origin)
    ]
    graph = replace(
        stages,
        stages=tuple(replace(stages.stages[s], index=i) for i, s in enumerate(origin)),
        crossings=crossings,
        params=tuple(map(tuple, names)),
        buffers=tuple(stages.buffers[s] for s in origin),
        inputs=tuple(stages.inputs[s] for s in origin),
        shards=tuple(tuple(group) for group in shards if len(group) > 1),
    )
    return graph, tuple(placement)


def _part(value: Value, ranks: int) -> Value:
    """What one of several ranks sends of a value: a share of its rows, rounded up."""
    if ranks == 1 or not value.shape:
        return value
    return replace(value, shape=(-(-value.shape[0] // ranks), *value.shape[1:]))
