"""Stage graphs deeper than they need be, to build rows for: more micro-batches are then in flight."""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Value
from ..ir.stages import Crossing, StageGraph


def deepen(stages: StageGraph, slack: int) -> StageGraph:
    """The stages with edges added until each but those at the end is `slack` deeper, at most as in a chain.

    A stage holds as many micro-batches as it is deep. Where stages take unequally long, a few more in flight
    keep fast ones from waiting. Rows that are built for the deeper graph are good for the one that is given,
    in which every stage waits for less.

    stages: each after those that it reads from.

    >>> from pipeloom.ir.flow import dag
    >>> towers = dag(5, [(0, 1), (2, 3), (1, 4), (3, 4)])
    >>> sorted(set(deepen(towers, 1).between) - set(towers.between))
    [(1, 3)]
    """
    count = len(stages.stages)
    depth, deeper = [0] * count, [0] * count
    added = []
    for stage in reversed(range(count)):
        readers = stages.successors[stage]
        depth[stage] = 1 + max((depth[reader] for reader in readers), default=0)
        deeper[stage] = 1 + max((deeper[reader] for reader in readers), default=0)
        wanted = min(count - stage, depth[stage] + slack) if readers else depth[stage]
        behind = [other for other in range(stage + 1, count) if deeper[stage] <= deeper[other] < wanted]
        if behind:
            reader = max(behind, key=deeper.__getitem__)
            deeper[stage] = 1 + deeper[reader]
            value = Value(name=f"behind {stage}", shape=(1,), dtype="float32", needs_grad=True)
            added.append(Crossing(value=value, source=stage, target=reader))
    return replace(stages, crossings=(*stages.crossings, *added))
