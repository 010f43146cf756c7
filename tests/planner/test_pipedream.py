"""PipeDream's dynamic programme, as the paper has it and as its repository does."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from pipeloom.planner.strategies.pipedream import Layer, partition


def chain(seconds, activations=None, parameters=None) -> list[Layer]:
    activations = activations or [0.0] * len(seconds)
    parameters = parameters or [0.0] * len(seconds)
    return [
        Layer(name=f"l{k}", forward_s=s / 3, backward_s=2 * s / 3, activation_bytes=a, parameter_bytes=p)
        for k, (s, a, p) in enumerate(zip(seconds, activations, parameters, strict=True))
    ]


@pytest.mark.parametrize(
    ("layers", "stages", "bandwidth", "memory", "found"),
    [
        (chain([1, 1, 1, 1, 2, 2]), 4, 10.0, inf, (2.0, (0, 2, 4, 5, 6))),
        # Large activations at a cut count in the paper only: either 2 * 40 / 10 in the middle, or 9.
        (chain([3, 3, 3, 3], [5, 40, 5, 0]), 2, inf, inf, (6.0, (0, 2, 4))),
        (chain([3, 3, 3, 3], [5, 40, 5, 0]), 2, 10.0, inf, (8.0, (0, 2, 4))),
        (chain([3, 3, 3, 4], [5, 60, 5, 0]), 2, 10.0, inf, (9.0, (0, 3, 4))),
        # The first of two stages holds two micro-batches of its layers.
        (chain([1, 1, 1, 1], [10] * 4), 2, 1e9, 40.0, (2.0, (0, 2, 4))),
        (chain([1, 1, 1, 1], [10] * 4), 2, 1e9, 30.0, (3.0, (0, 1, 4))),
        (chain([1, 1, 1, 1], [10] * 4), 2, 1e9, 29.0, (inf, ())),
    ],
)
def test_examples(layers, stages, bandwidth, memory, found):
    assert partition(layers, stages, bandwidth, memory) == found


@pytest.mark.parametrize("bandwidth", [10.0, inf])
def test_the_best_of_all_cuts(bandwidth):
    rng = np.random.default_rng(1)
    for _ in range(40):
        layers = chain(rng.uniform(1, 5, 6), [*rng.uniform(0, 40, 5), 0.0], list(rng.uniform(0, 30, 6)))
        memory = float(rng.uniform(20, 400))
        every = [(0, *inner, 6) for inner in combinations(range(1, 6), 2)]
        seconds, cuts = partition(layers, 3, bandwidth, memory)
        assert seconds == pytest.approx(min(slowest(layers, own, bandwidth, memory) for own in every))
        assert not cuts or slowest(layers, cuts, bandwidth, memory) == pytest.approx(seconds)


def slowest(layers: list[Layer], cuts, bandwidth: float, memory: float) -> float:
    times = [2 * layers[cut - 1].activation_bytes / bandwidth for cut in cuts[1:-1]]
    for stage, (start, end) in enumerate(pairwise(cuts)):
        own = layers[start:end]
        held = (len(cuts) - 1 - stage) * sum(x.activation_bytes + x.parameter_bytes for x in own)
        times.append(sum(x.forward_s + x.backward_s for x in own) if held <= memory else inf)
    return max(times)
