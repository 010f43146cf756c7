"""The limit on residuals: who passes it, where, by how much, and what to do; at the simulated peak."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from pipeloom.checks.schedules import check
from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.memory_limit import check_memory_limit
from pipeloom.simulator.simulate import simulate

MiB = 2**20
COST = StageCost(
    forward_s=1.0,
    backward_s=2.0,
    input_grad_s=1.0,
    weight_grad_s=1.0,
    residual_bytes=MiB,
    carried_bytes=MiB // 2,
    transient_bytes={"B": MiB // 4},
)


def one_f_one_b(ranks: int = 4) -> Schedule:
    return registry.build("1f1b", chain(ranks), tuple(range(ranks)), 8)


def refused(made: Schedule, cost: StageCost, caps: list[float]) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_memory_limit(made, dag(made.stages, []), [cost] * made.stages, caps)
    return str(caught.value)


def test_a_schedule_at_its_caps_passes_and_one_byte_less_is_named() -> None:
    made, stages = one_f_one_b(), dag(4, [])
    caps = [4.25 * MiB, 3.25 * MiB, 2.25 * MiB, 1.25 * MiB]
    check_memory_limit(made, stages, [COST] * 4, caps)
    check_memory_limit(made, stages, [COST] * 4, [inf] * 4)
    for rank in range(4):
        tight = [cap - (r == rank) for r, cap in enumerate(caps)]
        with pytest.raises(ScheduleError, match=rf"rank {rank} needs .* at {rank}B0: 1 B above its cap"):
            check_memory_limit(made, stages, [COST] * 4, tight)


def test_the_message_says_which_action_to_move() -> None:
    assert refused(one_f_one_b(), COST, [3.0 * MiB, inf, inf, inf]) == (
        "rank 0 needs 4.0 MiB at 0F3: 1.0 MiB above its cap of 3.0 MiB\n"
        "hint: keep fewer in flight: move 0B0 in front of 0F3, or use smaller micro-batches or more stages"
    )
    made = registry.build("gpipe", chain(2), (0, 1), 6)
    hint = refused(made, replace(COST, transient_bytes={"F": 2 * MiB}), [inf, 3.0 * MiB])
    assert hint.startswith("rank 1 needs 4.0 MiB at 1F1: 1.0 MiB above its cap of 3.0 MiB\n")
    assert "move 1B0 in front of 1F1" in hint


def test_a_move_that_would_block_is_not_advised() -> None:
    """In GPipe the last rank runs its backwards after all forwards, so rank 0 cannot go first."""
    made = registry.build("gpipe", chain(2), (0, 1), 6)
    with pytest.raises(ScheduleError) as caught:
        check_memory_limit(made, chain(2), [COST] * 2, [3.1 * MiB, inf])
    assert caught.value.hint == (
        "keep fewer in flight on every rank: 0B0 could run before 0F3 if the other ranks did not wait for "
        "0F3 first; or use smaller micro-batches or more stages"
    )


def test_doing_what_the_message_says_keeps_to_the_cap() -> None:
    made = one_f_one_b(2)
    rows = parse_rows(("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    moved = Schedule(name="moved", microbatches=3, placement=(0, 1), rows=rows)
    caps = [1.25 * MiB, inf]
    assert "move 0B0 in front of 0F1" in refused(made, COST, caps)
    check(moved, chain(2))
    check_memory_limit(moved, dag(2, []), [COST] * 2, caps)


def test_several_actions_are_named_where_one_frees_too_little() -> None:
    rows = parse_rows(("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",))
    made = Schedule(name="", microbatches=3, placement=(0,), rows=rows)
    hint = refused(made, COST, [2.25 * MiB]).partition("hint: ")[2]
    assert hint.startswith("keep fewer in flight: move 0I0 0W0 in front of 0F2, or use smaller")


def test_what_no_order_can_help_is_said() -> None:
    assert refused(one_f_one_b(), COST, [inf, inf, 0.5 * MiB, inf]).endswith(
        "hint: use smaller micro-batches or more stages: 2F0 alone does not fit, however few micro-batches "
        "are in flight"
    )


def test_caps_and_costs_are_counted() -> None:
    with pytest.raises(ScheduleError, match="3 caps and 4 stage costs for 4 ranks and 4 stages"):
        check_memory_limit(one_f_one_b(), chain(4), [COST] * 4, [inf] * 3)


def simulated(made: Schedule, stages: StageGraph, costs: list[StageCost]) -> list[int]:
    cluster = Cluster(
        devices=(Device(name="any", memory_bytes=1),) * made.ranks,
        within_node=Link(bandwidth_bytes_per_s=1e9),
    )
    timeline = simulate(lower(made, stages), stages, tuple(costs), cluster)
    return [timeline.peak_bytes(rank) for rank in range(made.ranks)]


@pytest.mark.parametrize("name", registry.names())
def test_the_least_limit_that_passes_is_the_simulated_peak(name: str) -> None:
    usual, placement = registry.default_placement(name, 4)
    empty = tuple(replace(c, value=replace(c.value, shape=(0,))) for c in usual.crossings)
    stages = replace(usual, crossings=empty)
    made = registry.build(name, stages, placement, 8)
    costs = [replace(COST, residual_bytes=1000 * (s + 3)) for s in range(made.stages)]
    peaks = simulated(made, stages, costs)
    check_memory_limit(made, usual, costs, peaks)
    for rank in range(made.ranks):
        with pytest.raises(ScheduleError, match=rf"rank {rank} needs .* 1 B above"):
            check_memory_limit(made, usual, costs, [peak - (r == rank) for r, peak in enumerate(peaks)])
