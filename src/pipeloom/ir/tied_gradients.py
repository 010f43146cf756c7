"""Tied gradients: what is summed over which ranks.

A rank that holds tied parameters, or replicas of a stage, has one REDUCE, on the lowest of its stages that
reads one. It stands for one sum for each set of ranks that shares parameters with it, of all that they
share. It begins them all and waits for them all, so that no order can block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .stages import StageGraph


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The gradients of the parameters `names`, each of which is on all of `ranks` and on no other one, are
    added over these. `stages`: those that read one of them. All three ascend.

    A rank with several of the stages has one gradient for them. With a single rank nothing is sent.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def reductions(stages: StageGraph, placement: Sequence[int]) -> tuple[tuple[Reduction, ...], ...]:
    """For each rank what its REDUCE does, by ranks; empty for a rank without tied parameters.

    placement: rank of each stage.

    >>> from pipeloom.ir.flow import dag
    >>> tied = dag(3, [(0, 1), (1, 2)], params={0: ("embedding", "scale"), 2: ("embedding", "scale")})
    >>> [[(r.names, r.ranks) for r in rank] for rank in reductions(tied, (0, 1, 2))]
    [[(('embedding', 'scale'), (0, 2))], [], [(('embedding', 'scale'), (0, 2))]]
    """
    names: dict[tuple[int, ...], list[str]] = {}
    read: dict[tuple[int, ...], set[int]] = {}
    for name in sorted(stages.tied):
        ranks = tuple(sorted({placement[stage] for stage in stages.tied[name]}))
        names.setdefault(ranks, []).append(name)
        read.setdefault(ranks, set()).update(stages.tied[name])
    by_rank: list[list[Reduction]] = [[] for _ in range(max(placement) + 1)]
    for ranks in sorted(names):
        reduction = Reduction(names=tuple(names[ranks]), stages=tuple(sorted(read[ranks])), ranks=ranks)
        for rank in ranks:
            by_rank[rank].append(reduction)
    return tuple(tuple(row) for row in by_rank)
