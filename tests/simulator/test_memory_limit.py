"""The limit on residuals: who passes it, where, by how much, and what to do; at the simulated peak."""

from dataclasses import replace
from math import inf

import pytest
import refusals
from small import built, simulated

from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules import registry
from pipeloom.simulator.memory_limit import check_memory_limit

MiB = 2**20

KEEPS = equal_costs(1, residual_bytes=MiB)[0]
COST = replace(KEEPS, carried_bytes=MiB // 2, transient_bytes={"B": MiB // 4})
LARGE = replace(COST, transient_bytes={"F": 2 * MiB})

ONE = built("1f1b", 4, 8)


def refused(made: Schedule, cost: StageCost, caps: list[float]) -> str:
    given = (made, dag(made.stages, []), [cost] * made.stages, caps)
    return refusals.refused(ScheduleError, check_memory_limit, *given)


@pytest.mark.parametrize(
    ("made", "cost", "caps", "words"),
    [
        (ONE, COST, [3, inf, inf, inf], "rank 0 needs 4.0 MiB at 0F3: 1.0 MiB above its cap of 3.0 MiB"),
        (ONE, COST, [3, inf, inf, inf], "run more backwards before 0F3"),
        (built("gpipe", 2, 6), LARGE, [inf, 3], "rank 1 needs 4.0 MiB at 1F1"),
        (ONE, COST, [inf, inf, 0.5, inf], "2F0 alone does not fit"),
        (ONE, COST, [inf] * 3, "3 caps"),
    ],
)
def test_the_message_says_what_passes_the_limit_and_what_to_do(made, cost, caps, words) -> None:
    assert words in refused(made, cost, [cap * MiB for cap in caps])


@pytest.mark.sampled("forward_only", "eager_1f1b", "zb_1p", "v_min", "dualpipev", "gis", "chimera", "po_h")
@pytest.mark.parametrize("name", registry.names())
def test_the_least_limit_that_passes_is_the_simulated_peak(name: str) -> None:
    usual, _ = registry.default_placement(name, 4)
    empty = tuple(replace(c, value=replace(c.value, shape=(0,))) for c in usual.crossings)
    made = built(name, 4, 8)
    costs = tuple(replace(COST, residual_bytes=1000 * (s + 3)) for s in range(made.stages))
    timeline = simulated(made, costs, replace(usual, crossings=empty))
    peaks = [timeline.peak_bytes(rank) for rank in range(made.ranks)]
    check_memory_limit(made, usual, costs, peaks)
    for rank in range(made.ranks):
        with pytest.raises(ScheduleError, match=rf"rank {rank} needs .* 1 B above"):
            check_memory_limit(made, usual, costs, [peak - (r == rank) for r, peak in enumerate(peaks)])
