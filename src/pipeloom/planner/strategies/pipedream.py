"""pipedream, pipedream-repo, vpipe: chains of modules and of layers.

PipeDream's dynamic programme, as the paper has it and as its repository does:

    paper   A(j, m) = min over i < j of  max(A(i, m - 1), 2 a_i / B, sum of times of i+1 .. j)
            a stage keeps weights and activations of as many micro-batches as there are stages, one less from
            stage to stage
    repo    transfers of activations do not count, and memory is not looked at

Both take the outputs of layers for their activations, and neither knows of gradients, optimizer states, or
scratch; whether the cut fits is checked afterwards with our memory model, as for every planner. pipeloom runs
one worker per stage: the formulas for replicas are left out.

Source: Narayanan et al. 2019, SOSP, "PipeDream", section 3.1; repository msr-fiddle/pipedream at 7db6a1c,
`optimizer/optimizer_graph_hierarchical.py` (formulas only).

vpipe: layers as the smallest piece; a few layers move between neighbours at a time.

    start: PipeDream's straight pipeline over layers
    each stage keeps, recomputes or offloads whole layers, greedily, until it fits
    a Kernighan-Lin pass: take the best move of one layer over its boundary, even if it makes things worse,
        lock that layer, and so on; of all these moves the best prefix is kept
    passes until one gains next to nothing

vPipe-like, since its formulas are not public: Zhao et al. 2022, TPDS 33(3), of which the abstract was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from ...ir.graph import Op
from ..search.cut_search import Search, best_cuts
from ..search.layer_groups import Piece, borders, calls, layers
from ..search.problem import Cuts, Key, Partition, Problem
from ..stage_cost.tensors import Array, Indices

ROUNDS = 10
GAIN = 1e-6
"""Relative improvement below which passes end."""

State = tuple[Key, ...]
"""Keys of the stages, the worst first: states compare by their worst stage, then by the next, and so on."""


class Layer(NamedTuple):
    """A line of a PipeDream profile: seconds of forward and backward, bytes of its outputs and parameters."""

    seconds: float
    activation_bytes: float
    parameter_bytes: float


def pipedream(search: Search) -> Cuts:
    """By the paper's formulas, module by module."""
    return _by_modules(search, search.slowest_link, min(search.caps))


def pipedream_repo(search: Search) -> Cuts:
    """By the repository's formulas, module by module."""
    return _by_modules(search, inf, inf)


def _by_modules(search: Search, bandwidth: float, memory_bytes: float) -> Cuts:
    places, stages = _places(search, calls), len(search.caps)
    chain = layers_between(search, places)
    # Where by its own account nothing fits, ours is asked afterwards.
    _, cuts = partition(chain, stages, bandwidth, memory_bytes)
    cuts = cuts or partition(chain, stages, bandwidth)[1]
    return tuple(int(places[cut]) for cut in cuts) or (0,)


def _places(search: Search, pieces: Callable[[Sequence[Op]], list[Piece]]) -> list[int]:
    """Where these pieces begin and the last one ends; all places for cuts if pieces are too few."""
    allowed = search.model.cut_points.tolist()
    places = borders(pieces(search.model.readers.ops), allowed)
    return places if len(places) > len(search.caps) else allowed


def layers_between(search: Search, places: Sequence[int]) -> list[Layer]:
    """A profile as PipeDream's profiler would give it, one layer between neighbouring places."""
    model, ops = search.model, search.model.readers.ops
    found = []
    seen: set[str] = set()
    for start, end in zip(places, places[1:], strict=False):
        own = ops[start:end]
        costs = [model.profile.costs[op.name] for op in own]
        fresh = {name: None for op in own for name in op.params if name not in seen}
        seen.update(fresh)
        seconds = sum(c.forward_s for c in costs) + sum(c.backward_s for c in costs)
        parameters = sum(model.graph.parameter[name].bytes for name in fresh)
        found.append(Layer(seconds, float(own[-1].output_bytes), parameters))
    return found


def partition(
    chain: Sequence[Layer], stages: int, bandwidth: float, memory_bytes: float = inf
) -> tuple[float, Cuts]:
    """The best cut of a chain into stages, one worker each: seconds of the slowest stage, and where stages
    begin, the end included; (inf, ()) if none fits.

    bandwidth: bytes per second between workers; inf: transfers do not count.  memory_bytes: of a worker.
    """
    seconds, held = (
        np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)])
        for column in (
            [layer.seconds for layer in chain],
            [layer.parameter_bytes + layer.activation_bytes for layer in chain],
        )
    )
    sent_s = 2 * np.array([0.0, *(layer.activation_bytes for layer in chain)]) / bandwidth

    def row(start: int, ends: Indices, ranks: Indices) -> Array:
        turn_s = np.maximum(sent_s[start], seconds[ends] - seconds[start])
        needed = (stages - ranks)[:, None] * (held[ends] - held[start])
        return np.where(needed <= memory_bytes, turn_s, inf)

    return best_cuts(np.arange(len(chain) + 1), stages, row)


def vpipe(search: Search) -> Cuts:
    """Cut positions, 0 and the number of ops included; () if nothing fits."""
    places = _places(search, layers)
    problem = replace(search.problem, points=places)
    _, start = partition(layers_between(search, places), len(search.caps), search.slowest_link)
    return problem.positions(move_layers(problem, start).cuts)


def move_layers(problem: Problem, cuts: Cuts) -> Partition:
    """Kernighan-Lin passes from given cuts until they gain nothing; never worse than the start."""
    for _ in range(ROUNDS):
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
