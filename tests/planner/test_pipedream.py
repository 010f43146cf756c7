"""PipeDream's dynamic programme in both modes, against trying every cut."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from pipeloom.planner.strategies.pipedream import Layer, partition


def chain(seconds: Sequence[float], activations: Sequence[float], parameters: Sequence[float]) -> list[Layer]:
    return [Layer(*one) for one in zip(seconds, activations, parameters, strict=True)]


def slowest_s(layers: list[Layer], cuts: Sequence[int], bandwidth: float, memory: float) -> float:
    """By the paper's formulas; inf if a stage holds more than a worker has.

    A cut sends activations and their gradient. Stage s of d keeps weights and activations of d - s
    micro-batches.
    """
    times = [2 * layers[cut - 1].activation_bytes / bandwidth for cut in cuts[1:-1]]
    for stage, (start, end) in enumerate(pairwise(cuts)):
        own = layers[start:end]
        times.append(sum(layer.seconds for layer in own))
        held = sum(layer.activation_bytes + layer.parameter_bytes for layer in own)
        if (len(cuts) - 1 - stage) * held > memory:
            return inf
    return max(times)


@pytest.mark.parametrize("mode", ["paper", "repo"])
def test_the_cut_is_the_best_of_all(mode: str) -> None:
    """The repository neither counts transfers nor looks at memory."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        layers = chain(rng.uniform(1, 5, 6), [*rng.uniform(0, 40, 5), 0.0], rng.uniform(0, 30, 6))
        limits = (10.0, float(rng.uniform(20, 200))) if mode == "paper" else (inf, inf)
        every = [(0, *inner, 6) for inner in combinations(range(1, 6), 2)]
        best = min(slowest_s(layers, cuts, *limits) for cuts in every)
        seconds, cuts = partition(layers, 3, *limits)
        assert seconds == pytest.approx(best)
        assert best == inf or slowest_s(layers, cuts, *limits) == pytest.approx(best)
