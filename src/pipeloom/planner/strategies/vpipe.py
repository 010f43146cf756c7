"""vpipe: vPipe-like. Layers as the smallest piece; a few layers move between neighbours at a time.

    start: PipeDream's straight pipeline over layers
    each stage keeps, recomputes or offloads whole layers, greedily, until it fits
    a Kernighan-Lin pass: take the best move of one layer over its boundary, even if it makes things worse,
        lock that layer, and so on; of all these moves the best prefix is kept
    passes until one gains next to nothing

vPipe-like, since its formulas are not public: Zhao et al. 2022, TPDS 33(3), of which the abstract was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..search.cut_search import Search
from ..search.layer_groups import borders, layers
from ..search.problem import Cuts, Key, Partition, Problem
from .pipedream import layers_between, partition

ROUNDS = 10
GAIN = 1e-6
"""Relative improvement below which passes end."""

State = tuple[Key, ...]
"""Keys of the stages, the worst first: states compare by their worst stage, then by the next, and so on."""


def vpipe(search: Search) -> Cuts:
    """Cut positions, 0 and the number of ops included; () if nothing fits."""
    allowed = search.model.cut_points.tolist()
    places = borders(layers(search.model.readers.ops), allowed)
    if len(places) <= len(search.caps):
        places = allowed
    problem = search.problem.coarser(places)
    _, start = partition(layers_between(search, places), len(search.caps), search.slowest_link)
    found = move_layers(problem, start)
    return problem.positions(found.cuts)


def move_layers(problem: Problem, cuts: Cuts, *, rounds: int = ROUNDS) -> Partition:
    """Kernighan-Lin passes from given cuts until they gain nothing; never worse than the start."""
    for _ in range(rounds):
        before = _state(problem, cuts)
        after, best = one_pass(problem, cuts)
        if after >= before:
            break
        cuts = best
        if before[0][0] == after[0][0] and before[0][1] - after[0][1] < GAIN * before[0][1]:
            break
    return problem.weigh(cuts)


def one_pass(problem: Problem, cuts: Cuts) -> tuple[State, Cuts]:
    """Every layer moves at most once, the best move first; the best state on the way."""
    best, chosen = _state(problem, cuts), cuts
    locked: set[int] = set()
    while moves := list(_moves(cuts, locked)):
        state, cuts, layer = min((_state(problem, to), to, layer) for to, layer in moves)
        locked.add(layer)
        if state < best:
            best, chosen = state, cuts
    return best, chosen


def _moves(cuts: Cuts, locked: set[int]) -> Iterator[tuple[Cuts, int]]:
    """(cuts after the move, piece that moves) for each boundary, to the left and to the right."""
    for index in range(1, len(cuts) - 1):
        here = cuts[index]
        for layer, to in ((here - 1, here - 1), (here, here + 1)):
            if layer not in locked and cuts[index - 1] < to < cuts[index + 1]:
                yield (*cuts[:index], to, *cuts[index + 1 :]), layer


def _state(problem: Problem, cuts: Cuts) -> State:
    keys = (problem.key(start, end, stage) for stage, (start, end) in enumerate(pairwise(cuts)))
    return tuple(sorted(keys, reverse=True))
