"""Clock cycles: the common way to write a family of schedules for any DAG of stages and any placement.

A family gives every action a clock time; a rank runs its actions by the clock. No rank can ever wait for
ever if along every dependency between ranks the clock goes up, and along every dependency within a rank it
does not go down: all actions sorted by (clock, place in the stage graph) then form one order that every row
follows. Distances between stages therefore count only the edges that change the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from typing import TypeAlias

from ..ir.action import Action, B, F
from ..ir.flow import Flow

Clock: TypeAlias = Callable[[Action], int]
Rows: TypeAlias = Iterable[Iterable[Action]]


def distance_from_start(flow: Flow, placement: Sequence[int]) -> dict[int, int]:
    """Stage -> most rank changes on a path that leads to it: the clock of its first forward.

    >>> from pipeloom.ir.flow import dag, flow_of
    >>> diamond = dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    >>> distance_from_start(flow_of(diamond), (0, 1, 2, 3))
    {0: 0, 1: 1, 2: 1, 3: 2}
    """
    return _longest(flow.order, flow.reads_from, placement)


def distance_to_end(flow: Flow, placement: Sequence[int]) -> dict[int, int]:
    """Stage -> most rank changes on a path that leads away from it to a stage that nothing reads."""
    return _longest(tuple(reversed(flow.order)), flow.read_by, placement)


def _longest(
    order: Sequence[int], before: Sequence[Sequence[int]], placement: Sequence[int]
) -> dict[int, int]:
    distance: dict[int, int] = {}
    for stage in order:
        steps = (distance[s] + (placement[s] != placement[stage]) for s in before[stage])
        distance[stage] = max(steps, default=0)
    return distance


def rows_by_clock(
    flow: Flow, placement: Sequence[int], microbatches: int, clock: Clock, *, backward: bool = True
) -> Iterator[Iterator[Action]]:
    """For each rank the F, and B if `backward`, of its stages in clock order.

    At equal times backwards come first, as they free memory, the reader's before the maker's; then
    forwards, the maker's before the reader's.
    """
    own: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage in flow.order:
        own[placement[stage]].append(stage)
    for stages in own:
        streams = [
            [Action(stage, B, microbatch) for microbatch in range(microbatches)]
            for stage in reversed(stages)
            if backward
        ]
        streams += [[Action(stage, F, microbatch) for microbatch in range(microbatches)] for stage in stages]
        yield merge(*streams, key=clock)
