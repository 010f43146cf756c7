"""Tied gradients: how they are summed over the ranks, in an order that cannot block.

A rank that holds tied parameters has one REDUCE, on the lowest of its stages that reads one. It stands
for all tied parameters of all stages of that rank, one after another in the order of their names. As every
rank follows the same order of names, the collectives of any set of ranks meet, whatever the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .stages import StageGraph


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One tied parameter: its replicas are added over `stages`, which sit on `ranks` (both ascending).

    A rank with several of the stages adds its own replicas first and copies the sum to each of them.
    With a single rank nothing is sent.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def reductions(stages: StageGraph, placement: Sequence[int]) -> tuple[tuple[Reduction, ...], ...]:
    """For each rank what its REDUCE does, in order; empty for a rank without tied parameters.

    placement: rank of each stage.

    >>> from pipeloom.ir.flow import dag
    >>> tied = dag(3, [(0, 1), (1, 2)], params={0: ("embedding",), 2: ("embedding",)})
    >>> [[r.ranks for r in rank] for rank in reductions(tied, (0, 1, 2))]
    [[(0, 2)], [], [(0, 2)]]
    """
    by_rank: list[list[Reduction]] = [[] for _ in range(max(placement) + 1)]
    for name in sorted(stages.tied):
        readers = stages.tied[name]
        ranks = tuple(sorted({placement[s] for s in readers}))
        reduction = Reduction(name=name, stages=readers, ranks=ranks)
        for rank in ranks:
            by_rank[rank].append(reduction)
    return tuple(tuple(row) for row in by_rank)
