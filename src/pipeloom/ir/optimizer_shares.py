"""Optimizer state that replicas share out: each keeps that of its share of the parameters, and steps these.

Source: stage 1 of ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054, section 5.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .stages import StageGraph


@dataclass(frozen=True, kw_only=True)
class OptimizerShares:
    """Who steps which parameter. ranks: those that hold the same stages.  owner: parameter -> one of them."""

    ranks: tuple[int, ...]
    owner: Mapping[str, int]

    def of(self, rank: int) -> frozenset[str]:
        """The parameters that a rank steps."""
        return frozenset(name for name, owner in self.owner.items() if owner == rank)


def optimizer_shares(
    stages: StageGraph, placement: Sequence[int], sizes: Mapping[str, int]
) -> tuple[OptimizerShares, ...]:
    """For each rank how the trained parameters of its stages are shared out: the largest first, into the
    emptiest share. So no share is larger than an even one by more than the largest parameter.

    stages: of all replicas.  placement: rank of each.  sizes: bytes of the parameters that are trained.
    A parameter that other stages read too is shared out once more among theirs.

    >>> from pipeloom.ir.flow import dag
    >>> from pipeloom.ir.stages import replicate
    >>> two = replicate(dag(1, [], params={0: ("a", "b", "c")}))
    >>> optimizer_shares(two, (0, 1), {"a": 3, "b": 2, "c": 2})[1].owner
    {'a': 0, 'b': 1, 'c': 1}
    """
    held: list[set[int]] = [set() for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        held[rank].add(stages.origin(stage))
    alike: dict[frozenset[int], list[int]] = {}
    for rank, origins in enumerate(held):
        alike.setdefault(frozenset(origins), []).append(rank)
    made = {}
    for group, ranks in alike.items():
        names = {name for stage in group for name in stages.params[stage] if name in sizes}
        load = dict.fromkeys(ranks, 0)
        owner = {}
        for name in sorted(names, key=lambda name: (-sizes[name], name)):
            owner[name] = min(ranks, key=lambda rank: (load[rank], rank))
            load[owner[name]] += sizes[name]
        made[group] = OptimizerShares(ranks=tuple(ranks), owner=owner)
    return tuple(made[frozenset(origins)] for origins in held)
