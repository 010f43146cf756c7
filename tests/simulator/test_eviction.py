"""Residuals that a rank evicts leave its memory and fill its partner's, until they are fetched."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.ir.action import eviction_partner
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering import lower
from pipeloom.simulator import simulate


def simulated(made: Schedule, stages: StageGraph | None = None, *, move_s: float = 0.0) -> Timeline:
    cost = StageCost(
        forward_s=1.0,
        backward_s=2.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        residual_bytes=1,
        other_s={"EVICT": move_s, "FETCH": move_s},
    )
    stages = stages or chain(made.stages)
    link = Link(bandwidth_bytes_per_s=float("inf"))
    cluster = Cluster(devices=(Device(name="any", memory_bytes=1),) * made.ranks, within_node=link)
    return simulate(lower(made, stages), stages, (cost,) * made.stages, cluster)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9, 16])
def test_bpipe_holds_no_more_than_its_limit(ranks: int) -> None:
    """ceil((p + 2) / 2) micro-batches of residuals on every rank, and as much on each where p is even."""
    made = schedules.build("bpipe", chain(ranks), tuple(range(ranks)), 3 * ranks)
    peaks = [peak["residuals"] for peak in simulated(made).peaks]
    assert max(peaks) == -(-(ranks + 2) // 2)
    if ranks % 2 == 0:
        assert set(peaks) == {(ranks + 2) // 2}


def test_everything_is_back_at_the_end() -> None:
    made = schedules.build("bpipe", chain(6), tuple(range(6)), 12)
    for curve in simulated(made, move_s=0.25).memory:
        assert curve.sizes[-1] == 0
        assert min(curve.sizes) >= 0


def test_the_giver_holds_until_the_end_and_the_receiver_from_the_start() -> None:
    schedules.build("bpipe", chain(2), (0, 1), 1)  # makes the kinds known
    rows = parse_rows(("0F0 0EVICT0 0FETCH0 0B0", "1F0 1B0"))
    made = Schedule(name="hand", microbatches=1, placement=(0, 1), rows=rows)
    timeline = simulated(made, dag(2, []), move_s=4.0)  # 0EVICT0 from 1 s to 5 s, 0FETCH0 to 9 s

    def held(rank: int, time: float) -> int:
        curve = timeline.memory[rank]
        return [size for at, size in zip(curve.times_s, curve.sizes, strict=True) if at <= time][-1]

    assert eviction_partner(0, 2) == 1
    times = (0.5, 2.5, 4.5, 6.0, 8.5, 10.0, 11.0)
    assert [held(0, t) for t in times] == [1, 1, 1, 1, 1, 1, 0]
    assert [held(1, t) for t in times] == [1, 2, 1, 1, 1, 0, 0]
