"""pipedream, pipedream-repo: PipeDream's dynamic programme, as the paper has it and as its repository does.

    paper   T(i->j, m) = max(sum of times, 2 (m - 1) / B * sum of weight bytes) / m
            A(j, m)    = min over i < j, m' < m of  max(A(i, m - m'), 2 a_i / B, T(i+1->j, m'))
            a stage keeps weights and activations of NOAM = ceil(workers / replicas of the first stage)
            micro-batches, one less from stage to stage
    repo    compute and all-reduce are added, with the 1/m over both and 4 (m - 1) P / (B m) for the weights;
            transfers of activations do not count unless a compression ratio is given; memory is not looked
            at unless asked for, and then it is ceil((n - m) / m') * (activations + parameters), with m of n
            workers used up to and including the stage, so that the last stage counts as empty

Both take the outputs of layers for their activations, and neither knows of gradients, optimizer states, or
scratch; whether the cut fits is checked afterwards with our memory model, as for every planner. pipeloom runs
one worker per stage (`straight`); the formulas for replicas are here for comparison.

Source: Narayanan et al. 2019, SOSP, "PipeDream", section 3.1; repository msr-fiddle/pipedream at 7db6a1c,
`optimizer/optimizer_graph_hierarchical.py` (formulas only).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Literal, TypeAlias

import numpy as np

from ..search.cut_search import Search
from ..search.layer_groups import borders, calls
from ..search.problem import Cuts
from ..stage_cost.arrays import Array

Mode: TypeAlias = Literal["paper", "repo"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One line of a PipeDream profile. Times in seconds, sizes in bytes; activations: its outputs."""

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, kw_only=True)
class PartitionRules:
    """What a partition is weighed by.

    bandwidth: bytes per second between workers.  memory_bytes: of a worker; None: not looked at.
    straight: one worker per stage.  compression: of activations in the repository's mode; None: transfers do
        not count there.
    """

    mode: Mode
    bandwidth: float
    memory_bytes: float | None = None
    straight: bool = True
    compression: float | None = None


@dataclass(frozen=True)
class Assignment:
    """seconds: of the slowest stage.  stages: (first layer, behind the last layer, workers) each."""

    seconds: float = inf
    stages: tuple[tuple[int, int, int], ...] = ()


def pipedream(search: Search) -> Cuts:
    """By the paper's formulas, module by module."""
    return _by_modules(search, "paper")


def pipedream_repo(search: Search) -> Cuts:
    """By the repository's formulas, module by module."""
    return _by_modules(search, "repo")


def _by_modules(search: Search, mode: Mode) -> Cuts:
    model = search.model
    places = borders(calls(model.readers.ops), model.cut_points.tolist())
    if len(places) <= len(search.caps):
        places = model.cut_points.tolist()
    chain = layers_between(search, places)
    slowest = search.slowest_link
    memory = min(search.caps) if mode == "paper" else None
    found = partition(
        chain, len(search.caps), PartitionRules(mode=mode, bandwidth=slowest, memory_bytes=memory)
    )
    if not found.stages:  # by its own account nothing fits; ours is asked afterwards
        found = partition(chain, len(search.caps), PartitionRules(mode=mode, bandwidth=slowest))
    return (0, *(int(places[end]) for _, end, _ in found.stages))


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


def stage_s(
    compute_s: Array, weights: Array, workers: int, rules: PartitionRules, *, inner: int = 1
) -> Array:
    """Seconds per micro-batch of stages on `workers` replicas each.

    inner: machines of the inner level, by which the repository divides the all-reduce of a single stage.
    """
    if rules.mode == "paper":
        return np.maximum(compute_s, 2 * (workers - 1) * weights / rules.bandwidth) / workers
    reduce_s = 4 * (workers - 1) * weights / (rules.bandwidth * workers) / inner
    return (compute_s + reduce_s) / workers


def partition(layers: Sequence[Layer], workers: int, rules: PartitionRules) -> Assignment:
    """The dynamic programme over `layers` and up to `workers` workers, all of them used.

    Takes time workers^2 x layers^2 with replicas, workers x layers^2 in a straight pipeline.
    """
    n = len(layers)
    seconds, weights, held = (
        np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)])
        for column in (
            [layer.forward_s + layer.backward_s for layer in layers],
            [layer.parameter_bytes for layer in layers],
            [layer.activation_bytes for layer in layers],
        )
    )
    sent = _transfer_s(layers, rules)
    best = np.full((workers + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    origin = np.zeros((workers + 1, n + 1, 2), dtype=np.int64)
    for used in range(1, workers + 1):
        for own in range(1, 2 if rules.straight else used + 1):
            before = best[used - own]
            if not np.isfinite(before).any():
                continue
            for end in range(1, n + 1):
                compute, state = seconds[end] - seconds[:end], weights[end] - weights[:end]
                values = np.maximum(np.maximum(before[:end], sent[:end]), stage_s(compute, state, own, rules))
                if rules.memory_bytes is not None:
                    # The paper's number in flight follows from the workers from here to the end.
                    factor = _in_flight(workers, used, own, rules.mode)
                    needed = factor * (state + held[end] - held[:end])
                    values = np.where(needed <= rules.memory_bytes, values, np.inf)
                start = int(np.argmin(values))
                if values[start] < best[used, end]:
                    best[used, end] = values[start]
                    origin[used, end] = start, own
    return _traced(best, origin, workers, n)


def _in_flight(workers: int, used: int, own: int, mode: Mode) -> int:
    """Copies that a stage on `own` workers keeps when `used` of all workers serve it and those before it."""
    behind = workers - used if mode == "repo" else workers - used + own
    return ceil(behind / own)


def noam(workers: int, replicas_of_first: int) -> int:
    """Micro-batches in flight in a steady pipeline.

    >>> noam(4, 1), noam(4, 3)
    (4, 2)
    """
    return ceil(workers / replicas_of_first)


def _transfer_s(layers: Sequence[Layer], rules: PartitionRules) -> Array:
    """Seconds to send what crosses in front of each layer, and its gradient back."""
    sizes = np.array([0.0, *(layer.activation_bytes for layer in layers)])
    if rules.mode == "paper":
        return 2 * sizes / rules.bandwidth
    return sizes * rules.compression / rules.bandwidth if rules.compression is not None else 0 * sizes


def _traced(best: Array, origin: Any, workers: int, n: int) -> Assignment:
    if best[workers, n] == inf:
        return Assignment()
    stages = []
    used, end = workers, n
    while used:
        start, own = (int(x) for x in origin[used, end])
        stages.append((start, end, own))
        used, end = used - own, start
    return Assignment(float(best[workers, n]), tuple(reversed(stages)))
