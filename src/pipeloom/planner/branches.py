"""Branches: an op graph as a tree of series, parallel branches and blocks, and the op order it makes.

Planners cut the op order into intervals. A forward may run the layers of two towers in turn, and an interval
of that order then holds a bit of each. In the order that is made here the ops of one branch stand together:

    forward      a1 b1 a2 b2 join          tree    series(parallel(a1 a2, b1 b2), join)
    branch by branch   a1 a2 b1 b2 join

A component is an op set that is weakly connected once everything outside it is taken away. In a component

    separators  are ops that no edge jumps over; edges from outside count as coming from in front of its
                first op, edges to the outside as going behind its last one: it is a series of separators and
                of what lies between two of them;
    branches    are the components of what lies between two separators;
    a block     is a component without separators. It stays in the order of the forward.

Every graph has such a tree, which loses and rewrites nothing: at worst it is one block, as with an encoder
that each layer of a decoder reads. Time: O(edges x nesting).

Such a decomposition drives the partitioner of GraphPipe (arXiv 2406.17145, section 5), which rewrites
graphs that are not series-parallel; here they have blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from random import Random
from typing import NamedTuple, TypeAlias, TypeVar, cast

from ..ir.graph import Value
from ..ir.stages import Crossing, StageGraph
from .stage_cost.tensors import Array, Readers

Edge: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class OpBlock:
    """Ops by position that are not taken apart, ascending."""

    ops: tuple[int, ...]


@dataclass(frozen=True)
class Series:
    """Terms one after another."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Parallel:
    """Terms that read nothing of each other, in the order of their first ops."""

    terms: tuple[Term, ...]


Term: TypeAlias = OpBlock | Series | Parallel


def decompose(ops: int, edges: Iterable[Edge]) -> Term:
    """The tree of a graph of ops 0 .. ops-1 in a topological order."""
    assert ops > 0, "a graph has ops"
    return _nested(_term(range(ops), sorted(set(edges))))


T = TypeVar("T")
Nested: TypeAlias = Generator["Nested[T]", T, T]
"""A function of a tree as a generator: it yields its calls for the terms within and is sent what they return.
So trees may be deeper than Python's stack, as those of models whose layers all read one mask."""


def _nested(first: Nested[T]) -> T:
    """What the first one returns."""
    calls, result = [first], cast(T, None)  # which starts a generator
    while calls:
        try:
            calls.append(calls[-1].send(result))
            result = cast(T, None)
        except StopIteration as done:
            calls.pop()
            result = done.value
    return result


def _term(ops: Sequence[int], edges: Sequence[Edge]) -> Nested[Term]:
    """The term of some ops, ascending. edges: between them."""
    parts = _components(ops, edges)
    if len(parts) == 1:
        return (yield _connected(ops, edges))
    terms = []
    for own, between in parts:
        terms.append((yield _connected(own, between)))
    return Parallel(tuple(terms))


def _connected(ops: Sequence[int], edges: Sequence[Edge]) -> Nested[Term]:
    if len(ops) == 1:
        return OpBlock((ops[0],))
    separates = _separators(ops, edges)
    if not any(separates):
        return OpBlock(tuple(ops))
    runs: list[tuple[bool, list[int]]] = []
    for op, alone in zip(ops, separates, strict=True):
        if alone or not runs or runs[-1][0]:
            runs.append((alone, [op]))
        else:
            runs[-1][1].append(op)
    number = {op: index for index, (_, run) in enumerate(runs) for op in run}
    inside: list[list[Edge]] = [[] for _ in runs]
    for edge in edges:
        if number[edge[0]] == number[edge[1]]:
            inside[number[edge[0]]].append(edge)
    terms = []
    for (_, run), own in zip(runs, inside, strict=True):
        terms.append((yield _term(run, own)))
    return Series(tuple(terms)) if len(terms) > 1 else terms[0]


def _separators(ops: Sequence[int], edges: Sequence[Edge]) -> list[bool]:
    """Of each op whether no edge jumps over it."""
    place = {op: index for index, op in enumerate(ops)}
    count = len(ops)
    change = [0] * (count + 1)

    # A sweep line over the ops: an edge covers those strictly between its ends. What nothing reads is taken
    # to be read behind all, and what reads nothing to read in front of all: so a branch without an end
    # covers, too.
    def jump(source: int, target: int) -> None:
        if target - source > 1:
            change[source + 1] += 1
            change[target] -= 1

    reads, is_read = {target for _, target in edges}, {source for source, _ in edges}
    for source, target in edges:
        jump(place[source], place[target])
    for op, index in place.items():
        if op not in reads:
            jump(-1, index)
        if op not in is_read:
            jump(index, count)
    return [jumped == 0 for jumped in accumulate(change[:count])]


def _components(ops: Sequence[int], edges: Sequence[Edge]) -> list[tuple[list[int], list[Edge]]]:
    """The weakly connected components with the edges inside, each ascending, in the order of first ops."""
    parent = {op: op for op in ops}

    # Union-find; each look-up halves the path to the root, so that it stays short.
    def root(op: int) -> int:
        while parent[op] != op:
            parent[op] = op = parent[parent[op]]
        return op

    for source, target in edges:
        parent[root(target)] = root(source)
    parts: dict[int, tuple[list[int], list[Edge]]] = {}
    for op in ops:
        parts.setdefault(root(op), ([], []))[0].append(op)
    for edge in edges:
        parts[root(edge[0])][1].append(edge)
    return list(parts.values())


def graph_edges(readers: Readers) -> list[Edge]:
    """Who reads whom, by position. Ops that share an updated buffer stay in one component."""
    edges = {
        (made, reader)
        for value in readers.graph.value
        if (made := readers.produced_at(value)) >= 0
        for reader in readers.value_readers(value)
        if reader != made
    }
    for names in readers.graph.together.values():
        positions = sorted(readers.position[name] for name in names)
        edges.update(zip(positions, positions[1:], strict=False))
    return sorted(edges)


class BranchOrdered(NamedTuple):
    """ops: all, those of a branch together.  borders: where in that row a branch begins or the last one ends,
    ascending; () where nothing is pulled apart, and the ops stay in the order of the forward."""

    ops: tuple[int, ...]
    borders: tuple[int, ...]


def branch_orders(
    term: Term, seconds: Array, least_s: float, most: int, edges: Sequence[Edge] = ()
) -> list[BranchOrdered]:
    """Up to so many op orders of a term, all different: branches in the order of their first ops; in the
    reverse one; the heaviest first; then shuffled, and pulled apart however light they are; then any. Of all
    branches an interval can hold a join with the tail of the last one only.

    edges: of the graph, for the last ones.  seconds: of each op.  least_s: branches stay in the order of the
        forward where all but the heaviest together take less: the projections of an attention are no towers.
    """

    def heaviest_first(branches: Branches, weights: Sequence[float]) -> Branches:
        return [branches[index] for index in sorted(range(len(branches)), key=lambda i: -weights[i])]

    def shuffled(seed: int) -> Pick:
        dice = Random(seed)
        return lambda branches, weights: dice.sample(branches, len(branches))

    ways: list[tuple[float, Pick]] = [
        (least_s, lambda branches, weights: branches),
        (least_s, lambda branches, weights: branches[::-1]),
        (least_s, heaviest_first),
        (0.0, lambda branches, weights: branches),
        *((0.0, shuffled(seed)) for seed in range(most // 2)),
    ]
    made = [_nested(_ordered(term, seconds, least, pick)) for least, pick in ways[: 3 if most <= 3 else None]]
    if most > 3:
        made += [
            BranchOrdered(_wandering(len(seconds), edges, Random(seed)), (0,)) for seed in range(2 * most)
        ]
    different: dict[tuple[int, ...], BranchOrdered] = {}
    for ordered in made:
        different.setdefault(ordered.ops, ordered)
    return list(different.values())[:most]


def _wandering(ops: int, edges: Sequence[Edge], dice: Random) -> tuple[int, ...]:
    """Some topological order, which half of the time goes on with a reader of the last op."""
    waits = [0] * ops
    readers: list[list[int]] = [[] for _ in range(ops)]
    for source, target in edges:
        waits[target] += 1
        readers[source].append(target)
    ready = [op for op in range(ops) if not waits[op]]
    order: list[int] = []
    while ready:
        near = [op for op in ready if order and op in readers[order[-1]]]
        op = dice.choice(near if near and dice.random() < 0.5 else ready)
        ready.remove(op)
        order.append(op)
        for reader in readers[op]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return tuple(order)


Branches: TypeAlias = list[BranchOrdered]

Pick: TypeAlias = Callable[[Branches, Sequence[float]], Branches]
"""Branches and their seconds -> the branches in the order that they get."""


def _ordered(term: Term, seconds: Array, least_s: float, pick: Pick) -> Nested[BranchOrdered]:
    if isinstance(term, OpBlock):
        return BranchOrdered(term.ops, ())
    parts = []
    for part in term.terms:
        parts.append((yield _ordered(part, seconds, least_s, pick)))
    if isinstance(term, Series):
        return _side_by_side(parts, ends=False)
    weights = [float(seconds[list(part.ops)].sum()) for part in parts]
    if not any(part.borders for part in parts) and sum(weights) - max(weights) < least_s:
        return BranchOrdered(tuple(sorted(chain(*(part.ops for part in parts)))), ())
    return _side_by_side(pick(parts, weights), ends=True)


def _side_by_side(parts: Sequence[BranchOrdered], *, ends: bool) -> BranchOrdered:
    """Parts behind each other. ends: what is between two of them is a border."""
    ops: list[int] = []
    borders: list[int] = [0] if ends else []
    for part in parts:
        borders += [len(ops) + border for border in part.borders]
        ops += part.ops
        borders += [len(ops)] if ends else []
    return BranchOrdered(tuple(ops), tuple(sorted(set(borders))))


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
