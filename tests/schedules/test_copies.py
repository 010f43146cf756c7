"""Copies to the host in the rows of any schedule: who leaves, that there is room, and what it costs."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings, strategies as st
from refusals import refused
from small import built, by_hand, simulated

from pipeloom.checks.schedules import check
from pipeloom.ir.action import AWAIT, COPYING, OFFLOAD, RELOAD, Action, B, F, W
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.ir.weight_policies import Updates
from pipeloom.lowering.steady import SteadyRows
from pipeloom.schedules import registry
from pipeloom.schedules.formats import parse_schedule
from pipeloom.schedules.language import uplinks
from pipeloom.schedules.language.placements import spread
from pipeloom.schedules.list_scheduler.choose import row_times
from pipeloom.schedules.registry import build, build_steady
from pipeloom.schedules.scenario import MicrobatchTimes, Scenario, csv_text, simulate_schedule
from pipeloom.simulator.memory_limit import check_memory_limit

SIZE = 1000


def held_at_worst(schedule: Schedule) -> list[float]:
    """The most residuals of a stage that each rank holds if a copy ends only when it is awaited."""
    peaks = []
    for row in schedule.rows:
        awaited = {(a.stage, a.microbatch) for a in row if a.kind == AWAIT}
        held = most = 0
        for a in row:
            held += {F: 1, AWAIT: -1, RELOAD: (a.stage, a.microbatch) in awaited}.get(a.kind, 0)
            most = max(most, held)
            held -= a.kind in (B, W)
        assert held == 0
        peaks.append(float(most))
    return peaks


def without(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(a for a in row if a.kind not in COPYING) for row in schedule.rows)


CHUNKED = st.sampled_from(["po", "gis", "interleaved_1f1b", "zb_v", "looped_bfs"])


@settings(max_examples=8)
@given(CHUNKED, st.integers(2, 5), st.integers(2, 4), st.integers(1, 12), st.integers(1, 4))
@example("po", 3, 4, 9, 3)
def test_rows_keep_their_order_and_hold_the_same_on_all_links(name, ranks, chunks, microbatches, offload):
    made = built(f"{name}:offload={min(offload, chunks)}", ranks, microbatches, chunks)
    if name != "po":
        assert without(made) == built(name, ranks, microbatches, chunks).rows
    check(made, chain(made.stages))
    away = {(a.stage, a.microbatch) for row in made.rows for a in row if a.kind == OFFLOAD}
    assert all(len({s for s, _ in away if made.placement[s] == rank}) <= chunks for rank in range(ranks))
    caps, costs = held_at_worst(made), equal_costs(made.stages, residual_bytes=SIZE)
    copied = tuple(replace(cost, carried_bytes=SIZE, offloaded_bytes=SIZE) for cost in costs)
    check_memory_limit(made, chain(made.stages), copied, [held * SIZE for held in caps])
    with pytest.raises(ScheduleError, match="above its cap"):
        check_memory_limit(made, chain(made.stages), copied, [held * SIZE - 1 for held in caps])


@pytest.mark.parametrize("k", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(("ranks", "chunks"), [(3, 2), (4, 4), (8, 2)])
def test_po_holds_what_the_formula_says_at_no_cost(ranks: int, chunks: int, k: float) -> None:
    """p (v - n) (v - n + 1) / 2v and 3 in transit, 4 for n = v; pairs share an uplink."""
    where = Scenario(ranks=ranks, chunks=chunks, microbatches=4 * ranks, copy_ratio=k, per_uplink=2)
    share = 1 / chunks  # F, I and W of a micro-batch take 1 s each on all stages of a rank together
    costs = equal_costs(ranks * chunks, forward_s=share, input_grad_s=share, weight_grad_s=share)
    for n in range(1, chunks + 1):
        made = simulate_schedule(f"po:offload={n}", where)
        rest = chunks - n
        most = ranks * rest * (rest + 1) / (2 * chunks) + 3 if rest else 4
        assert made.peak * chunks <= most
        assert max(held_at_worst(made.schedule)) <= most
        plain = replace(made.schedule, rows=without(made.schedule))
        alone = simulated(plain, costs, made.stages, made.cluster)
        assert made.summary.step_s <= (1.02 if k < 1 else 1.07) * alone.step_s


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "offload"), [("po_h", 4, 4, 2), ("po_f", 4, 3, 3), ("po_h", 3, 3, 2)]
)
def test_half_and_all_of_the_stages(name: str, ranks: int, chunks: int, offload: int) -> None:
    assert built(name, ranks, 8, chunks).rows == built(f"po:offload={offload}", ranks, 8, chunks).rows


def test_under_a_limit_single_microbatches_leave_the_longest_kept_first() -> None:
    made = built("1f1b:limit=6", 8, 24)
    assert max(held_at_worst(made)) <= 6
    away = [{a.microbatch for a in row if a.kind == OFFLOAD} for row in made.rows]
    assert 0 < len(away[0]) and all(len(a) >= len(b) for a, b in zip(away, away[1:], strict=False))
    assert not away[-1]


@pytest.mark.parametrize("dropped", [0, SIZE // 2])
def test_each_rank_copies_what_it_has_no_room_for(dropped: int) -> None:
    (cost,) = uplinks.with_copies(equal_costs(1, residual_bytes=SIZE), 0.75)
    cost = replace(cost, offloaded_bytes=SIZE - dropped, recomputed_bytes=dropped)

    def fitted(*room: int) -> tuple[Schedule, list[int]]:
        """In bytes, a multiple of a residual; and how many copies each rank has."""
        bytes_ = tuple(float(SIZE * n) for n in room)
        made = built("1f1b:fit=1", 4, 16, costs=(cost,) * 4, room_bytes=bytes_)
        return made, [sum(action.kind == OFFLOAD for action in row) for row in made.rows]

    assert fitted(4, 4, 4, 4)[0].rows == built("1f1b", 4, 16).rows
    made, away = fitted(4, 2, 2, 1)
    # Of three micro-batches in flight rank 1 has room for two, or for three of which half is made again.
    assert (away[1] > 0) == (not dropped) and (away[0], away[2], away[3]) == (0, 0, 0)
    if not dropped:
        check_memory_limit(made, chain(4), (cost,) * 4, [4 * SIZE, 2 * SIZE, 2 * SIZE, SIZE])
    assert all(fitted(0, 0, 0, 0)[1][:-1])


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("po:offload=5,v=4", "5 of the 4 stages"),
        ("po:offload=1.5", "1.5 of the 2 stages"),
        ("1f1b:limit=0", "0 residuals"),
        ("1f1b:fit=2", "fit=2"),
        ("1f1b:offload=-1,fit=1", "offloads -1 of the 1 stages"),
        ("po:fit=1,limit=3", "and limits"),
        ("dualpipe:offload=1", "pairs"),
        ("forward_only:offload=1", "forwards only"),
        ("zb_h1:limit=3", "W right behind I"),  # no copy makes room
    ],
)
def test_what_cannot_be_is_refused(name: str, word: str) -> None:
    assert word in refused(ScheduleError, built, name, 4, 8)


def test_rows_with_copies_are_read_as_they_are_written() -> None:
    made = simulate_schedule("po_f", Scenario(ranks=2, microbatches=6))
    assert parse_rows(tuple(str(made.schedule).splitlines())) == made.schedule.rows
    assert parse_schedule(csv_text(made)).rows == made.schedule.rows


def test_a_window_too_short_for_its_copies_stays() -> None:
    last = built("1f1b:offload=1", 4, 8).rows[-1]
    assert [str(action) for action in last[:4]] == ["3F0", "3B0", "3F1", "3B1"]


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("k", [0.5, 1.5])
@pytest.mark.parametrize("name", ["po_f", "po_h", "1f1b:offload=1", "gis_g:group=2,v=2,offload=1", "zb_h1"])
def test_places_of_copies_are_compared_by_what_the_simulator_says(name: str, k: float, each: int) -> None:
    """Also where two ranks share an uplink."""
    times = MicrobatchTimes(forward_s=1.0, input_grad_s=1.3, weight_grad_s=0.7)
    scenario = Scenario(microbatches=8, times=times, transfer_s=0.3, copy_ratio=k, per_uplink=each)
    made = simulate_schedule(name, scenario)
    how = {"placement": made.schedule.placement, "stages": made.stages, "costs": made.costs}
    shared = uplinks.shared_uplinks(made.costs, 4, each)
    s = registry.shape_of(microbatches=8, transfer_s=0.3, uplinks=shared, **how)
    begin, end = row_times(made.schedule.columns, s)
    assert float(end.max()) == pytest.approx(made.timeline.step_s, rel=1e-9)
    assert (begin <= end).all()


@pytest.mark.parametrize(
    ("row", "held"),
    [
        ("0F0 0OFFLOAD0 0F1 0AWAIT0 0F2 0B2 0B1 0RELOAD0 0B0", 2),
        ("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0F2 0B2 0B1", 2),
        ("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B0 0B2 0B1", 3),
    ],
)
def test_what_is_awaited_is_on_the_host_until_its_reload(row: str, held: int) -> None:
    assert registry.in_flight(by_hand(row), on_device=True) == (held,)


# Rows of schedules with copies, with stages on all ranks, and of steps that repeat.


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("table", [((0, 1), 0, 1), (0, 1, (0, 1)), (0, (0, 1), 1)], ids=str)
def test_all_ranks_of_a_stage_keep_one_clock(name: str, table: tuple[int | tuple[int, ...], ...]) -> None:
    made = build(name, *spread(chain(3), table), 4)
    assert [len(row) for row in made.rows] == [16, 16]


@pytest.mark.parametrize("name", ["1f1b:offload=1", "zb_h1:offload=1"])
def test_rows_of_steps_have_every_copy_once(name):
    towers = dag(5, [(0, 1), (2, 3), (1, 4), (3, 4)])
    updates = Updates(policy="2bw", every=4)
    body = build_steady(name, towers, (0, 1, 2, 3, 4), updates)
    rows = SteadyRows(step=body, stages=towers, updates=updates)
    batches = 9
    fed = [rows.row(batch, batch) for batch in range(batches)] + [rows.drain(batches - 1, batches)]
    found = Counter(step.kind for row in fed for step in row.program.rows[0] if hasattr(step, "kind"))
    assert found["OFFLOAD"] == found["RELOAD"] > 4 * (batches - 2)
    assert found["F"] == 4 * batches == found["B"] + found["I"]
