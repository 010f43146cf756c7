"""Treatments of whole layers, as planners of layer granularity choose them.

    1. Offload whole layers, the largest first, while their copies hide behind the stage's computing.
    2. Then, layer by layer, recompute or offload all that may be, by bytes freed at the peak per second that
       it costs.

No layer is treated in part, and none is spared once it is no longer needed: that is the contrast with the
choice per tensor. A layer that is recomputed keeps what later layers read of it: it is made again from what
the layer before has left, inside the backward like everything that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..stage_cost.arrays import Indices
from ..stage_cost.residuals import KEEP, OFFLOAD, RECOMPUTE
from .choose import Solver
from .greedy import TreatmentChoice, TreatmentProblem, seconds_of


def choose_by_layers(layer_of: Sequence[int]) -> Solver:
    """A solver for `memopt.optimise`. layer_of: op, by its position -> number of its layer, -1 for none."""
    number = np.array([*layer_of, -1])

    def solve(task: TreatmentProblem) -> TreatmentChoice:
        residuals, peak = task.moments.residuals, task.moments.peak
        made, last_in, _ = task.moments.lives
        own, read = number[made], number[np.where(last_in < 0, made, last_in)]
        inner = (own == read) & (task.may > 0)
        layers = [np.flatnonzero(own == layer) for layer in np.unique(own[own >= 0])]
        choice = np.full(len(residuals), KEEP, dtype=np.int64)
        level = peak(choice)
        for layer in sorted(layers, key=lambda layer: -residuals.size[layer].sum()):
            after = _treated(choice, layer, OFFLOAD)
            if task.per_offloaded and level > task.allowance and _away(task, after) <= task.hidden:
                choice, level = after, peak(after)
        while level > task.allowance:
            now = level, seconds_of(task, choice)
            picks = [_worth(task, now, pick) for pick in _picks(task, choice, layers, inner)]
            picks = [pick for pick in picks if pick[0] > 0]
            if not picks:
                return TreatmentChoice(True, seconds_of(task, choice), level, choice)
            _, choice = max(picks, key=lambda pick: pick[0])
            level = peak(choice)
        return TreatmentChoice(False, seconds_of(task, choice), level, choice)

    return solve


def _treated(choice: Indices, which: Indices, treatment: int) -> Indices:
    found = choice.copy()
    found[which] = treatment
    return found


def _away(task: TreatmentProblem, choice: Indices) -> float:
    return float(task.moments.residuals.size[choice == OFFLOAD].sum())


def _picks(
    task: TreatmentProblem, choice: Indices, layers: list[Indices], inner: NDArray[np.bool_]
) -> Iterator[Indices]:
    """The choices with one more layer treated."""
    for layer in layers:
        if (choice[layer] == KEEP).all():
            if inner[layer].any():
                yield _treated(choice, layer[inner[layer]], RECOMPUTE)
            after = _treated(choice, layer, OFFLOAD)
            if task.per_offloaded and _away(task, after) <= task.most:
                yield after


def _worth(task: TreatmentProblem, now: tuple[float, float], after: Indices) -> tuple[float, Indices]:
    """Bytes freed at the peak per second that it costs, and the choice. now: peak and seconds before."""
    seconds = seconds_of(task, after) - now[1]
    freed = now[0] - task.moments.peak(after)
    return (freed / seconds if seconds > 0 else freed * np.inf if freed > 0 else 0.0), after
