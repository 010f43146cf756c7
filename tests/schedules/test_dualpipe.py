"""DualPipe and DualPipeV: F of one direction, or chunk, and B of the other as pairs.

Published (DeepSeek-V3, arXiv 2412.19437): bubble (p/2 - 1)(F&B + B - 3W), at most p + 1 micro-batches of one
replica; DualPipeV on p/2 ranks the same.
"""

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
from small import built, simulated

from pipeloom.ir.action import B, F, I, W
from pipeloom.ir.costs import StageCost, equal_costs, pair_seconds
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.stages import StageGraph
from pipeloom.schedules import registry
from pipeloom.schedules.registry import build, in_flight

Made = tuple[Schedule, tuple[StageCost, ...], StageGraph]
EQUAL = equal_costs(1)[0]
every_name = pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])


def made_with(name: str, ranks: int, microbatches: int, cost: StageCost, limit: float | None = None) -> Made:
    stages, placement = registry.default_placement(name, ranks)
    costs = (cost,) * len(placement)
    made = build(name, stages, placement, microbatches, costs=costs, limit_bytes=limit)
    return made, costs, stages


def bubbles(made: Schedule, costs: tuple[StageCost, ...], stages: StageGraph) -> list[float]:
    """Of each rank the seconds in which it does not work, a pair as long as it takes."""
    step_s = simulated(made, costs, stages).step_s
    idle = [step_s - sum(costs[a.stage].seconds(a.kind) for a in row) for row in made.rows]
    for pair in made.pairs:
        alone = sum(costs[a.stage].seconds(a.kind) for a in pair)
        idle[made.placement[pair[0].stage]] += alone - pair_seconds(costs, pair)
    return idle


@pytest.mark.sampled(8)
@pytest.mark.parametrize("factor", [1.0, 0.8])
@every_name
@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
def test_bubble_and_what_is_held_are_as_published(name: str, ranks: int, factor: float) -> None:
    """The innermost ranks have exactly the published bubble, and no rank a larger one."""
    both = ranks if name == "dualpipe" else 2 * ranks
    for microbatches in (both, 2 * both):
        made = made_with(name, ranks, microbatches, replace(EQUAL, pair_factor=factor))
        assert max(bubbles(*made)) == pytest.approx((both / 2 - 1) * (3 * factor + 2 - 3 * 1))
        held, placement = in_flight(made[0]), made[0].placement
        for rank in range(ranks):
            assert sum(h for h, where in zip(held, placement, strict=True) if where == rank) == both + 1


@every_name
def test_with_long_input_gradients_it_is_no_worse_than_published(name: str) -> None:
    cost = StageCost(forward_s=1, backward_s=2, input_grad_s=1.4, weight_grad_s=0.6, pair_factor=0.9)
    made = made_with(name, 8 if name == "dualpipe" else 4, 16, cost)
    assert max(bubbles(*made)) <= (8 / 2 - 1) * (0.9 * 3 + 2 - 3 * 0.6) + 1e-9


@every_name
def test_pairs_are_f_and_b_of_the_two_stages_of_a_rank(name: str) -> None:
    m, made = 16, built(name, 4, 16)
    place = made.placement
    assert {(a.kind, b.kind) for a, b in made.pairs} == {(F, B)}
    assert all(a.stage != b.stage and place[a.stage] == place[b.stage] for a, b in made.pairs)
    counts = Counter(place[a.stage] for a, _ in made.pairs)
    for rank, row in enumerate(made.rows):
        kinds = Counter(a.kind for a in row)
        assert kinds[B] + kinds[I] == kinds[F] == 2 * m and kinds[I] == kinds[W]
        assert kinds[B] == 2 * m - kinds[I] >= counts[rank] > m  # most backwards hide a forward


def test_the_rows_of_two_ranks() -> None:
    """Both directions enter at once; the first pair of a rank that nobody stands behind is left apart."""
    assert str(built("dualpipe", 2, 3)).splitlines() == [
        "0F0 3F0 0F1 3B0 3F1&0B0 0F2&3B1 3F2&0B1 3B2 0I2 0W2",
        "2F0 1F0 2F1 1B0 1F1&2B0 2F2&1B1 1F2&2B1 1B2 2I2 2W2",
    ]


@every_name
@pytest.mark.parametrize(("factor", "pays"), [(1.0, False), (0.8, True)])
def test_where_pairs_gain_nothing_they_may_be_left_out(name: str, factor: float, pays: bool) -> None:
    stages, placement = registry.default_placement(name, 4)
    paired, apart = built(name, 4, 16), built(f"{name}:pairs=0", 4, 16)
    assert paired.pairs and not apart.pairs
    costs = (replace(EQUAL, pair_factor=factor),) * len(placement)
    steps = [simulated(made, costs, stages).step_s for made in (paired, apart)]
    assert steps[0] != steps[1] and (steps[0] < steps[1]) == pays
    halves = built(f"{name}:pairs=0", 4, 16, split_backward=True)
    assert not any(a.kind == B for row in halves.rows for a in row)


@every_name
def test_less_memory_than_the_published_order_takes(name: str) -> None:
    change = {F: 1, B: -1, W: -1}
    for row in built(f"{name}:memory=2.25", 4, 16).rows:
        assert max(accumulate(change.get(a.kind, 0) for a in row)) <= 4


@every_name
def test_a_limit_in_bytes(name: str) -> None:
    """The published order needs p + 1 residuals of half a rank; with room for fewer another is built."""
    cost = replace(EQUAL, residual_bytes=100, carried_bytes=50)
    room = 100 * (5 if name == "dualpipe" else 9)
    assert made_with(name, 4, 8, cost, room)[0].pairs
    tight = made_with(name, 4, 8, cost, room - 1)[0]
    assert not tight.pairs
    change = {F: 100, B: -100, I: -50, W: -50}
    assert all(max(accumulate(change[a.kind] for a in row)) < room for row in tight.rows)
