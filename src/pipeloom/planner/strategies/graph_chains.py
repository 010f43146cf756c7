"""pipedream-graph, piper: planners that look at the whole graph and cut it into a chain of stages.

Their stages are any convex sets of pieces, not only intervals of one order, but they run one after another:
each has the in-flight micro-batches of its place in the chain.

    pipedream-graph   states are antichains, each with the down-set D that it ends; as PipeDream's repository
                      weighs stages, transfers counted:
                      A(D, m) = min over D' in D of max(A(D', m - 1), sent(D') / B, compute(D - D'))
    piper             pairs of down-sets; with s stages from this one to the end it holds s micro-batches:
                      f(D', s) = min over D with D' in D of max(compute + 2 messages / B, f(D, s - 1)),
                      where s x residuals + states of D - D' are within the cap

Both have one worker per stage and keep every residual here, as pipeloom's other comparators do: replicas,
tensor parallelism and Piper's choice of what is recomputed are left out. A piece is a layer, or an op. Graphs
with too many down-sets are refused; 40,000 is Piper's own limit. Of unequal devices the caps count, and the
times of the first.

Sources: Narayanan et al. 2019, SOSP, and msr-fiddle/pipedream at 7db6a1c, `optimizer_graph_hierarchical.py`;
Tarnawski et al. 2021, NeurIPS, "Piper", and msr-fiddle/piper at d7fc8cf. From descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ..branches import BranchOrdered
from ..search.cut_search import Search, growing_part
from ..search.down_sets import DownSets, PieceGraph, best_chain
from ..search.layer_groups import borders, layers
from ..search.problem import Cuts
from ..stage_cost.tensors import Array, Indices

MOST = 40_000
"""Down-sets beyond which Piper refuses a graph."""

MOST_ANTICHAINS = 100_000
"""The same of PipeDream's programme, which has no limit of its own: some minutes, and some GB."""

Pieces: TypeAlias = Literal["layer", "op"]


Arranged: TypeAlias = tuple[BranchOrdered, Cuts]
"""Stages as intervals of an op order of their own, and where they begin in that row, both ends included."""


class Machine(NamedTuple):
    """What a chain is for: bytes per second between neighbours, and bytes per device."""

    bandwidth: float
    caps: Sequence[float]


Partitioner: TypeAlias = Callable[[PieceGraph, Machine], list[list[int]]]


def pipedream_graph(graph: PieceGraph, machine: Machine) -> list[list[int]]:
    """The pieces of each stage, one per device. Raises: PlanError if there are too many antichains."""
    sets = DownSets(graph, MOST_ANTICHAINS)
    total = sets.total(graph.seconds)
    sent_s = sets.leaving_bytes / machine.bandwidth

    def row(number: int, inner: Indices) -> Array:
        return np.asarray(np.maximum(total[number] - total[inner], sent_s[inner])[None, :])

    return _stages(sets, best_chain(sets, len(machine.caps), row)[1])


def piper(graph: PieceGraph, machine: Machine) -> list[list[int]]:
    """The pieces of each stage; none if nothing fits. Raises: PlanError if there are too many down-sets."""
    sets = DownSets(graph, MOST)
    total, held, state = map(sets.total, (graph.seconds, graph.held_bytes, graph.state_bytes))
    devices = len(machine.caps)
    in_flight = np.arange(devices, 0, -1)[:, None]
    caps = np.array(machine.caps)[:, None]

    def row(number: int, inner: Indices) -> Array:
        seconds = total[number] - total[inner]
        seconds = seconds + 2 * sets.message_bytes(number, inner) / machine.bandwidth
        needed = in_flight * (held[number] - held[inner]) + state[number] - state[inner]
        return np.where(needed <= caps, seconds, np.inf)

    return _stages(sets, best_chain(sets, devices, row)[1])


def _stages(sets: DownSets, chain: Sequence[int]) -> list[list[int]]:
    masks = [sets.masks[number] for number in chain]
    pieces = range(len(sets.graph.seconds))
    return [
        [piece for piece in pieces if (upto & ~before) >> piece & 1]
        for before, upto in zip(masks, masks[1:], strict=False)
    ]


def pieces_of(search: Search, granularity: Pieces) -> tuple[Indices, PieceGraph]:
    """Where pieces begin in the search's op order, its end included; and what they cost.

    Residuals and states are sums over pieces, as Piper has them: what only a whole stage needs (messages,
    scratch, parameters that it has once for several pieces) is left out, or counted for each.
    """
    model = search.model
    allowed = model.cut_points.tolist()
    wanted = borders(layers(model.readers.ops), allowed) if granularity == "layer" else allowed
    starts = np.array(wanted)
    held, state = [], []
    for start, end in zip(wanted, wanted[1:], strict=False):
        footprint, _ = model.row(start, np.array([end]), exact=False)
        empty, one = model.peaks(growing_part(footprint), np.array([0, 1]))[:, 0].tolist()
        held.append(one - empty)
        state.append(empty)
    values = [(own, others, float(value.bytes)) for value, own, others in model.readers.between(starts)]
    seconds = np.diff(model.tables.prefix_s[0][starts]).tolist()
    return starts, PieceGraph(tuple(seconds), tuple(held), tuple(state), tuple(values))


def arranged_by(partition: Partitioner, granularity: Pieces) -> Callable[[Search], Arranged | None]:
    """A planner that answers with an op order of its own; None if nothing fits by its own account."""

    def arrange(search: Search) -> Arranged | None:
        starts, graph = pieces_of(search, granularity)
        stages = partition(graph, Machine(search.slowest_link, search.caps))
        if not stages:
            return None
        ops = search.model.readers.ops
        forward = {
            op.name: place for place, op in enumerate(o for o in search.model.graph.ops if not o.cheap)
        }
        order: list[int] = []
        cuts = [0]
        for pieces in stages:
            own = [op for piece in pieces for op in ops[starts[piece] : starts[piece + 1]]]
            order += [forward[op.name] for op in own]
            cuts.append(len(order))
        return BranchOrdered(tuple(order), (0,)), tuple(cuts)

    return arrange


pipedream_graph_layers = arranged_by(pipedream_graph, "layer")
pipedream_graph_ops = arranged_by(pipedream_graph, "op")
piper_layers = arranged_by(piper, "layer")
piper_ops = arranged_by(piper, "op")
