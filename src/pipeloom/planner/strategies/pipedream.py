"""pipedream, pipedream-repo: PipeDream's dynamic programme, as the paper has it and as its repository does.

    paper   A(j, m) = min over i < j of  max(A(i, m - 1), 2 a_i / B, sum of times of i+1 .. j)
            a stage keeps weights and activations of as many micro-batches as there are stages, one less from
            stage to stage
    repo    transfers of activations do not count, and memory is not looked at

Both take the outputs of layers for their activations, and neither knows of gradients, optimizer states, or
scratch; whether the cut fits is checked afterwards with our memory model, as for every planner. pipeloom runs
one worker per stage, so the formulas for replicas are left out.

Source: Narayanan et al. 2019, SOSP, "PipeDream", section 3.1; repository msr-fiddle/pipedream at 7db6a1c,
`optimizer/optimizer_graph_hierarchical.py` (formulas only).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ..search.cut_search import Search, best_cuts
from ..search.layer_groups import borders, calls
from ..search.problem import Cuts
from ..stage_cost.tensors import Array, Indices


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One line of a PipeDream profile. Times in seconds, sizes in bytes; activations: its outputs."""

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float


def pipedream(search: Search) -> Cuts:
    """By the paper's formulas, module by module."""
    return _by_modules(search, search.slowest_link, min(search.caps))


def pipedream_repo(search: Search) -> Cuts:
    """By the repository's formulas, module by module."""
    return _by_modules(search, inf, inf)


def _by_modules(search: Search, bandwidth: float, memory_bytes: float) -> Cuts:
    model, stages = search.model, len(search.caps)
    places = borders(calls(model.readers.ops), model.cut_points.tolist())
    if len(places) <= stages:
        places = model.cut_points.tolist()
    chain = layers_between(search, places)
    # Where by its own account nothing fits, ours is asked afterwards.
    _, cuts = partition(chain, stages, bandwidth, memory_bytes)
    cuts = cuts or partition(chain, stages, bandwidth)[1]
    return tuple(int(places[cut]) for cut in cuts) or (0,)


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
        found.append(
            Layer(
                name=own[0].module or own[0].name,
                forward_s=sum(c.forward_s for c in costs),
                backward_s=sum(c.backward_s for c in costs),
                activation_bytes=float(own[-1].output_bytes),
                parameter_bytes=sum(model.graph.parameter[name].bytes for name in fresh),
            )
        )
    return found


def partition(
    layers: Sequence[Layer], stages: int, bandwidth: float, memory_bytes: float = inf
) -> tuple[float, Cuts]:
    """The best cut of layers into stages, one worker each: seconds of the slowest stage, and where stages
    begin, the end included; (inf, ()) if none fits.

    bandwidth: bytes per second between workers; inf: transfers do not count.  memory_bytes: of a worker.
    """
    seconds, held = (
        np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)])
        for column in (
            [layer.forward_s + layer.backward_s for layer in layers],
            [layer.parameter_bytes + layer.activation_bytes for layer in layers],
        )
    )
    sent_s = 2 * np.array([0.0, *(layer.activation_bytes for layer in layers)]) / bandwidth

    def row(start: int, ends: Indices, ranks: Indices) -> Array:
        turn_s = np.maximum(sent_s[start], seconds[ends] - seconds[start])
        needed = (stages - ranks)[:, None] * (held[ends] - held[start])
        return np.where(needed <= memory_bytes, turn_s, inf)

    return best_cuts(np.arange(len(layers) + 1), stages, row)
