"""DualPipe and DualPipeV: F of one direction, or chunk, and B of the other as pairs.

Published (DeepSeek-V3, arXiv 2412.19437): bubble (p/2 - 1)(F&B + B - 3W), at most p + 1 micro-batches of one
replica; DualPipeV on p/2 ranks the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest

from pipeloom.ir.action import B, F, I, W
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs, pair_seconds
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.schedules.registry import Times, build, in_flight
from pipeloom.simulator.simulate import simulate

NAMES = ["dualpipe", "dualpipev"]


def built(
    name: str, ranks: int, microbatches: int, cost: StageCost, *, limit_bytes: float | None = None
) -> tuple[Schedule, StageGraph, tuple[StageCost, ...]]:
    stages, placement = registry.default_placement(name, ranks)
    costs = (cost,) * len(placement)
    times = Times(costs=costs, limit_bytes=limit_bytes)
    return build(name, stages, placement, microbatches, times=times), stages, costs


def simulated(made: Schedule, stages: StageGraph, costs: tuple[StageCost, ...]) -> Timeline:
    link = Link(bandwidth_bytes_per_s=float("inf"))
    cluster = Cluster(devices=(Device(name="any", memory_bytes=1),) * made.ranks, within_node=link)
    return simulate(lower(made, stages), stages, costs, cluster)


def busy_s(made: Schedule, costs: tuple[StageCost, ...]) -> list[float]:
    """Per rank the seconds of work, a pair as long as it takes."""
    gain = [0.0] * made.ranks
    for pair in made.pairs:
        alone = sum(costs[a.stage].seconds(a.kind) for a in pair)
        gain[made.placement[pair[0].stage]] += alone - pair_seconds(costs, pair)
    alone_s = [sum(costs[a.stage].seconds(a.kind) for a in row) for row in made.rows]
    return [whole - saved for whole, saved in zip(alone_s, gain, strict=True)]


@pytest.mark.parametrize("factor", [1.0, 0.8])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
def test_bubble_and_what_is_held_are_as_published(name: str, ranks: int, factor: float) -> None:
    """The innermost ranks have exactly the published bubble, and no rank a larger one."""
    both = ranks if name == "dualpipe" else 2 * ranks
    cost = replace(equal_costs(1)[0], pair_factor=factor)
    for microbatches in (both, 2 * both):
        made, stages, costs = built(name, ranks, microbatches, cost)
        step_s = simulated(made, stages, costs).step_s
        bubbles = [step_s - busy for busy in busy_s(made, costs)]
        published = (both / 2 - 1) * (3 * factor + 2 - 3 * 1)
        assert max(bubbles) == pytest.approx(published)
        held = in_flight(made)
        for rank in range(ranks):
            mine = [s for s, where in enumerate(made.placement) if where == rank]
            assert sum(held[s] for s in mine) == both + 1


@pytest.mark.parametrize("name", NAMES)
def test_with_long_input_gradients_it_is_no_worse_than_published(name: str) -> None:
    cost = StageCost(forward_s=1, backward_s=2, input_grad_s=1.4, weight_grad_s=0.6, pair_factor=0.9)
    both, ranks = 8, 8 if name == "dualpipe" else 4
    made, stages, costs = built(name, ranks, 2 * both, cost)
    step_s = simulated(made, stages, costs).step_s
    published = (both / 2 - 1) * (0.9 * 3 + 2 - 3 * 0.6)
    assert max(step_s - busy for busy in busy_s(made, costs)) <= published + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_f_and_b_of_the_two_stages_of_a_rank(name: str) -> None:
    ranks, m = 4, 16
    made, *_ = built(name, ranks, m, equal_costs(1)[0])
    assert {(a.kind, b.kind) for a, b in made.pairs} == {(F, B)}
    assert all(
        a.stage != b.stage and made.placement[a.stage] == made.placement[b.stage] for a, b in made.pairs
    )
    counts = Counter(made.placement[a.stage] for a, _ in made.pairs)
    for rank, row in enumerate(made.rows):
        kinds = Counter(a.kind for a in row)
        assert kinds[B] + kinds[I] == kinds[F] == 2 * m and kinds[I] == kinds[W]
        assert kinds[B] == 2 * m - kinds[I] >= counts[rank] > m  # most backwards hide a forward


def test_the_rows_of_two_ranks() -> None:
    """Both directions enter at once; the first pair of a rank that nobody stands behind is left apart."""
    made, *_ = built("dualpipe", 2, 3, equal_costs(1)[0])
    assert str(made).splitlines() == [
        "0F0 3F0 0F1 3B0 3F1&0B0 0F2&3B1 3F2&0B1 3B2 0I2 0W2",
        "2F0 1F0 2F1 1B0 1F1&2B0 2F2&1B1 1F2&2B1 1B2 2I2 2W2",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_where_pairs_gain_nothing_they_may_be_left_out(name: str) -> None:
    stages, placement = registry.default_placement(name, 4)
    paired = build(name, stages, placement, 16)
    apart = build(f"{name}:pairs=0", stages, placement, 16)
    assert paired.pairs and not apart.pairs
    costs = equal_costs(len(placement))
    assert simulated(apart, stages, costs).step_s < simulated(paired, stages, costs).step_s
    gaining = tuple(replace(cost, pair_factor=0.8) for cost in costs)
    assert simulated(apart, stages, gaining).step_s > simulated(paired, stages, gaining).step_s
    halves = build(f"{name}:pairs=0", stages, placement, 16, split_backward=True)
    assert not any(a.kind == B for row in halves.rows for a in row)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("ranks", "microbatches", "option"), [(4, 3, ""), (3, 8, ""), (1, 2, ""), (4, 16, ":memory=2.25")]
)
def test_other_shapes_are_built_too(name: str, ranks: int, microbatches: int, option: str) -> None:
    """Few micro-batches, an odd number of ranks, less memory than the published order takes."""
    stages, placement = registry.default_placement(name, ranks)
    made = build(name + option, stages, placement, microbatches)
    assert sum(map(len, made.rows)) >= 2 * len(placement) * microbatches
    if option:
        change = {F: 1, B: -1, W: -1}
        assert all(max(accumulate(change.get(a.kind, 0) for a in row)) <= 4 for row in made.rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_in_bytes(name: str) -> None:
    """The published order needs p + 1 residuals of half a rank; with room for fewer another is built."""
    cost = replace(equal_costs(1)[0], residual_bytes=100, carried_bytes=50)
    room = 100 * (5 if name == "dualpipe" else 9)
    assert built(name, 4, 8, cost, limit_bytes=room)[0].pairs
    tight = built(name, 4, 8, cost, limit_bytes=room - 1)[0]
    assert not tight.pairs
    change = {F: 100, B: -100, I: -50, W: -50}
    assert all(max(accumulate(change[a.kind] for a in row)) < room for row in tight.rows)
