"""Weights that several ranks hold: what is summed over which of them, and who steps which.

Replicas may share out the state of the optimizer: each keeps that of its share of the parameters, and steps
these. Source: stage 1 of ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054, section 5.1).

A rank that holds tied parameters, or replicas of a stage, has one REDUCE, on the lowest of its stages that
reads one. It stands for one sum for each set of ranks that shares parameters with it, of all that they
share. It begins them all and waits for them all, so that no order can block.

Where replicas share out the optimizer's state, what exactly they share is summed for the owner of each
parameter only, with half the bytes of a sum for all. A parameter that other ranks read too,
such as an embedding tied over the first and the last stage, is stepped once among the replicas of each, so
all of its ranks get its sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The gradients of the parameters `names`, each of which is on all of `ranks` and on no other one, are
    added over these. `stages`: those that read one of them. All three ascend.  owner: the only rank that gets
    the sums; None where all do.

    A rank with several of the stages has one gradient for them. With a single rank nothing is sent.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    owner: int | None = None


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


def for_owners(reduction: Reduction, shares: Sequence[OptimizerShares]) -> tuple[Reduction, ...]:
    """What a reduction becomes where replicas share out the optimizer's state: one for each of its ranks that
    owns something, in their order, or itself if its ranks are not the replicas of one set of stages.

    shares: of all ranks; empty where nothing is shared out.

    >>> shares = (OptimizerShares(ranks=(0, 1), owner={"a": 1, "b": 0, "c": 1}),) * 2
    >>> both = Reduction(names=("a", "b", "c"), stages=(0, 1), ranks=(0, 1))
    >>> [(part.names, part.owner) for part in for_owners(both, shares)]
    [(('b',), 0), (('a', 'c'), 1)]
    """
    share = shares[reduction.ranks[0]] if shares else None
    if share is None or share.ranks != reduction.ranks or len(share.ranks) == 1:
        return (reduction,)
    parts = []
    for rank in share.ranks:
        if names := tuple(name for name in reduction.names if share.owner.get(name) == rank):
            parts.append(replace(reduction, names=names, owner=rank))
    return tuple(parts)


def names_for_owners(
    stages: StageGraph, placement: Sequence[int], shares: Sequence[OptimizerShares]
) -> tuple[frozenset[str], ...]:
    """For each rank the parameters whose gradients are summed for one owner only, its own or another's."""
    rows = reductions(stages, placement)
    return tuple(
        frozenset(
            name
            for reduction in row
            for part in for_owners(reduction, shares)
            if part.owner is not None
            for name in part.names
        )
        for row in rows
    )
