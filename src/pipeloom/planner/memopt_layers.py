"""Treatments of whole layers, as planners of layer granularity choose them.

    1. Offload whole layers, the largest first, while their copies hide behind the stage's computing.
    2. Then, layer by layer, recompute or offload all that may be, by bytes freed per second that it costs.

No layer is treated in part, and none is spared once it is no longer needed: that is the contrast with the
choice per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .intervals import Indices
from .memopt import Solver
from .memopt_greedy import Task
from .residuals import KEEP, OFFLOAD, RECOMPUTE, Residuals


def by_layers(layer_of: Mapping[str, int]) -> Solver:
    """A solver for `memopt.optimise`. layer_of: op -> number of its layer."""

    def solve(residuals: Residuals, task: Task) -> Indices | None:
        own = np.array([layer_of.get(name.partition(".")[0], -1) for name in residuals.names])
        choice = np.full(len(residuals), KEEP, dtype=np.int64)
        layers = [np.flatnonzero(own == layer) for layer in np.unique(own[own >= 0])]
        freed = away = 0.0
        if task.per_offloaded:
            for layer in sorted(layers, key=lambda layer: -residuals.size[layer].sum()):
                size = float(residuals.size[layer].sum())
                if freed < task.need and away + size <= task.hidden:
                    choice[layer] = OFFLOAD
                    away, freed = away + size, freed + size * task.per_offloaded
        open_layers = [layer for layer in layers if (choice[layer] == KEEP).all()]
        picks = [pick for layer in open_layers for pick in _picks(residuals, task, layer)]
        for _, gain, layer, treatment, size in sorted(picks, key=lambda pick: pick[0] / pick[1]):
            if freed >= task.need:
                break
            if (choice[layer] != KEEP).any() or (treatment == OFFLOAD and away + size > task.most):
                continue
            inside = layer if treatment == OFFLOAD else layer[task.may[layer] > 0]
            choice[inside] = treatment
            away, freed = away + size * (treatment == OFFLOAD), freed + gain
        return choice if freed >= task.need else None

    return solve


def _picks(
    residuals: Residuals, task: Task, layer: Indices
) -> list[tuple[float, float, Indices, int, float]]:
    """(seconds, bytes freed, residuals, treatment, bytes of one copy) of treating a layer either way."""
    found = []
    again = layer[task.may[layer] > 0]
    if task.per_recomputed and len(again):
        choice = np.full(len(residuals), KEEP, dtype=np.int64)
        choice[again] = RECOMPUTE
        size = float(residuals.size[again].sum())
        found.append((residuals.recompute_s(choice), size * task.per_recomputed, layer, RECOMPUTE, size))
    if task.per_offloaded:
        size = float(residuals.size[layer].sum())
        found.append((size * task.s_per_byte, size * task.per_offloaded, layer, OFFLOAD, size))
    return [pick for pick in found if pick[1] > 0]
