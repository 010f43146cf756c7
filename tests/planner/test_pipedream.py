"""PipeDream's dynamic programme in both modes, and its formulas for replicas."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from pipedream_formulas import PartitionRules, noam, partition, stage_s

from pipeloom.planner.strategies.pipedream import Layer, partition as straight


def chain(seconds, activations=None, parameters=None) -> list[Layer]:
    activations = activations or [0.0] * len(seconds)
    parameters = parameters or [0.0] * len(seconds)
    return [
        Layer(name=f"l{k}", forward_s=s / 3, backward_s=2 * s / 3, activation_bytes=a, parameter_bytes=p)
        for k, (s, a, p) in enumerate(zip(seconds, activations, parameters, strict=True))
    ]


PAPER = PartitionRules(mode="paper", bandwidth=10.0)


REPO = PartitionRules(mode="repo", bandwidth=10.0)


def test_a_straight_pipeline_balances_compute():
    found = partition(chain([1, 1, 1, 1, 2, 2]), 4, PAPER)
    assert found.seconds == 2.0
    assert [own for _, _, own in found.stages] == [1, 1, 1, 1]
    assert found.stages[-1] == (5, 6, 1)


def test_large_activations_at_a_cut_count_in_the_paper_only():
    """Difference 2: the repository ignores transfers unless a compression ratio is given."""
    layers = chain([3, 3, 3, 3], activations=[5, 40, 5, 0])
    assert [end for _, end, _ in partition(layers, 2, REPO).stages] == [2, 4]
    assert partition(layers, 2, REPO).seconds == 6.0
    assert partition(layers, 2, PAPER).seconds == 8.0  # either 2 * 40 / 10 in the middle, or 9
    tight = chain([3, 3, 3, 3], activations=[5, 60, 5, 0])
    assert [end for _, end, _ in partition(tight, 2, PAPER).stages] in ([1, 4], [3, 4])
    compressed = replace(REPO, compression=3.0)
    assert [end for _, end, _ in partition(tight, 2, compressed).stages] != [2, 4]


def test_compute_and_all_reduce_overlap_in_the_paper_and_add_up_in_the_repository():
    """Difference 1."""
    compute, weights = np.array([8.0]), np.array([20.0])
    assert stage_s(compute, weights, 2, PAPER)[0] == pytest.approx(max(8.0, 2 * 1 * 20 / 10) / 2)
    assert stage_s(compute, weights, 2, REPO)[0] == pytest.approx((8.0 + 4 * 1 * 20 / (10 * 2)) / 2)
    inner = stage_s(compute, weights, 2, REPO, inner=2)[0]
    assert inner == pytest.approx((8.0 + 4 * 1 * 20 / (10 * 2) / 2) / 2)


def test_memory_is_counted_differently():
    """Difference 3: in the repository the last stage counts as empty, and each has one copy less."""
    layers = chain([1, 1, 1, 1], activations=[10, 10, 10, 10])
    halves = ((0, 2, 1), (2, 4, 1))
    # The first stage's two layers take 10 bytes each: two micro-batches in the paper, one in the repository.
    for mode, memory, stages in (
        ("repo", 20, halves),
        ("paper", 1, ()),
        ("paper", 20, ()),
        ("paper", 40, halves),
    ):
        rules = PartitionRules(mode=mode, bandwidth=1e9, memory_bytes=memory)
        assert partition(layers, 2, rules).stages == stages
    assert noam(4, 3) == 2


@pytest.mark.parametrize(("mode", "bandwidth"), [("paper", 10.0), ("repo", np.inf)])
def test_the_planner_is_the_formula_for_one_worker_per_stage(mode, bandwidth):
    rng = np.random.default_rng(1)
    for _ in range(40):
        layers = chain(rng.uniform(1, 5, 6), [*rng.uniform(0, 40, 5), 0.0], list(rng.uniform(0, 30, 6)))
        memory = float(rng.uniform(20, 200)) if mode == "paper" else np.inf
        rules = PartitionRules(mode=mode, bandwidth=10.0, memory_bytes=memory if memory < np.inf else None)
        found = partition(layers, 3, rules)
        seconds, cuts = straight(layers, 3, bandwidth, memory)
        assert seconds == pytest.approx(found.seconds)
        assert cuts[1:] == tuple(end for _, end, _ in found.stages)


@pytest.mark.parametrize("mode", ["paper", "repo"])
def test_replicas_are_the_best_of_all_assignments(mode):
    rng = np.random.default_rng(0)
    for _ in range(15):
        layers = chain(rng.uniform(1, 5, 5), [*rng.uniform(0, 10, 4), 0.0], list(rng.uniform(0, 30, 5)))
        rules = PartitionRules(mode=mode, bandwidth=10.0, straight=False)
        assert partition(layers, 4, rules).seconds == pytest.approx(by_trying(layers, 4, rules))


def by_trying(layers: list[Layer], workers: int, rules: PartitionRules) -> float:
    n = len(layers)
    return min(
        weigh(layers, (0, *inner, n), share, rules)
        for stages in range(1, min(n, workers) + 1)
        for inner in combinations(range(1, n), stages - 1)
        for share in product(range(1, workers + 1), repeat=stages)
        if sum(share) == workers
    )


def weigh(layers: list[Layer], cuts, share, rules: PartitionRules) -> float:
    times = []
    for (start, end), own in zip(zip(cuts, cuts[1:], strict=False), share, strict=True):
        seconds = sum(x.forward_s + x.backward_s for x in layers[start:end])
        weights = sum(x.parameter_bytes for x in layers[start:end])
        times.append(float(stage_s(np.array([seconds]), np.array([weights]), own, rules)[0]))
    if rules.mode == "paper":
        times += [2 * layers[cut - 1].activation_bytes / rules.bandwidth for cut in cuts[1:-1]]
    return max(times)
