"""Orders of a public zero-bubble scheduler, timed here again, as bars: short actions, long messages.

F, I and W are of a rank, shared by its stages; a message takes its time whatever it carries.
"""

from __future__ import annotations

import pytest

from pipeloom.ir.costs import equal_costs
from pipeloom.schedules.list_scheduler.choose_recipe import fastest
from pipeloom.schedules.placements import loop
from pipeloom.schedules.registry import Times, entry, shape_of
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, SimulatedSchedule, simulate_schedule

PROFILES = [
    (1.0, 1.2, 0.9, 0.5),
    (1.0, 0.8, 1.2, 0.2),
    (1.0, 1.4, 0.6, 0.1),
    (1.0, 1.0, 1.0, 0.3),
    (1.0, 0.6, 1.4, 0.05),
    (1.0, 1.5, 0.5, 0.5),
    (1.0, 1.1, 0.8, 0.25),
]
"""F, I, W and a message."""


def simulated(
    name: str, ranks: int, microbatches: int, times: tuple[float, float, float, float], shortest: str = "step"
) -> SimulatedSchedule:
    forward, back, weight, transfer = times
    scenario = Scenario(
        ranks=ranks,
        microbatches=microbatches,
        times=MicrobatchTimes(forward_s=forward, input_grad_s=back, weight_grad_s=weight),
        transfer_s=transfer,
        shortest=shortest,
    )
    return simulate_schedule(name, scenario)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "times", "peak", "step_s"),
    [
        ("po:v=4", 4, 16, (1.0, 1.2, 0.9, 0.5), 2.75, 110.9),
        ("po:v=4", 4, 16, (1.0, 0.8, 1.2, 0.2), 2.75, 64.5),
        ("po:v=4", 4, 16, (1.0, 0.6, 1.4, 0.05), 2.75, 52.9),
        pytest.param("po:v=4", 16, 64, (1.0, 0.8, 1.2, 0.2), 10.75, 266.9, marks=pytest.mark.slow),
        pytest.param("gis:v=4", 16, 32, (1.0, 1.2, 0.9, 0.5), 16.0, 217.0, marks=pytest.mark.slow),
        pytest.param("po:v=4", 16, 64, (1.0, 1.4, 0.6, 0.1), 10.75, 252.4, marks=pytest.mark.slow),
        pytest.param("v_half", 16, 32, (1.0, 1.4, 0.6, 0.1), 9.0, 144.7, marks=pytest.mark.slow),
    ],
)
def test_no_longer_at_the_same_peak(
    name: str,
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float, float],
    peak: float,
    step_s: float,
) -> None:
    made = simulated(name, ranks, microbatches, times)
    assert made.summary.step_s <= step_s and made.peak <= peak


@pytest.mark.parametrize("ranks", [4, *(pytest.param(p, marks=pytest.mark.slow) for p in (8, 16))])
@pytest.mark.parametrize("times", PROFILES)
def test_gis_is_no_longer_than_its_published_variant(
    ranks: int, times: tuple[float, float, float, float]
) -> None:
    """W right behind its I is one of the orders that the family tries."""
    for microbatches in (2 * ranks, 4 * ranks):
        own, joined = (simulated(name, ranks, microbatches, times) for name in ("gis:v=4", "gis:v=4,join=1"))
        assert own.summary.step_s <= joined.summary.step_s * (1 + 2e-3) and own.peak <= joined.peak


def test_messages_of_a_link_follow_each_other() -> None:
    """What a family chooses among knows that: its figures are those of the simulator."""
    costs = equal_costs(8, forward_s=0.25, input_grad_s=0.25, weight_grad_s=0.25)
    shape = shape_of(2, microbatches=8, placement=loop(2, 4), times=Times(costs=costs, transfer_s=0.6))
    recipe = entry("looped_bfs").recipe
    assert recipe is not None
    expected = fastest(shape, recipe).outcome.step_s
    made = simulated("looped_bfs:v=4", 2, 8, (1.0, 1.0, 1.0, 0.6))
    assert made.summary.step_s == pytest.approx(expected)


def test_the_shortest_span_instead_of_the_shortest_step() -> None:
    by_step, by_span = (
        simulated("zb_1p", 4, 12, (1.0, 0.6, 1.4, 0.05), shortest=what).summary for what in ("step", "span")
    )
    assert by_span.span_s < by_step.span_s and by_span.step_s >= by_step.step_s
