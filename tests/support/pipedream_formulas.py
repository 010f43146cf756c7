"""PipeDream's formulas for replicas, which pipeloom's stages do not have: what its planner is compared with.

    paper   T(i->j, m) = max(sum of times, 2 (m - 1) / B * sum of weight bytes) / m
            A(j, m)    = min over i < j, m' < m of  max(A(i, m - m'), 2 a_i / B, T(i+1->j, m'))
            a stage keeps weights and activations of NOAM = ceil(workers / replicas of the first stage)
            micro-batches, one less from stage to stage
    repo    compute and all-reduce are added, with the 1/m over both and 4 (m - 1) P / (B m) for the weights;
            transfers of activations do not count unless a compression ratio is given; memory is not looked
            at unless asked for, and then it is ceil((n - m) / m') * (activations + parameters), with m of n
            workers used up to and including the stage, so that the last stage counts as empty

Source: see planner/strategies/pipedream.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Literal

import numpy as np

from pipeloom.planner.stage_cost.tensors import Array
from pipeloom.planner.strategies.pipedream import Layer


@dataclass(frozen=True, kw_only=True)
class PartitionRules:
    """What a partition is weighed by.

    bandwidth: bytes per second between workers.  memory_bytes: of a worker; None: not looked at.
    straight: one worker per stage.  compression: of activations in the repository's mode; None: transfers do
        not count there.
    """

    mode: Literal["paper", "repo"]
    bandwidth: float
    memory_bytes: float | None = None
    straight: bool = True
    compression: float | None = None


@dataclass(frozen=True)
class Assignment:
    """seconds: of the slowest stage.  stages: (first layer, behind the last layer, workers) each."""

    seconds: float = inf
    stages: tuple[tuple[int, int, int], ...] = ()


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


def _in_flight(workers: int, used: int, own: int, mode: str) -> int:
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
