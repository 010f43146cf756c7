"""Timelines and memory curves worked out by hand."""

from dataclasses import replace
from math import inf

import pytest
import refusals
from small import alike, built, changes, simulated

from pipeloom.ir.action import OFFLOAD, SEND_F, STEP, Action, B, F, Kind, W
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import DeadlockError, PlanError, ScheduleError
from pipeloom.ir.flow import dag
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.schedule import Program, Schedule, parse_program
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.memory_limit import check_memory_limit
from pipeloom.simulator.simulate import simulate
from pipeloom.simulator.summary import summarise


def step(name, stages, microbatches, costs=(), where=None, *, split=False, **how) -> Timeline:
    """Each stage on a rank of its own, F = I = W = 1 s, and messages that take no time, by default."""
    count = len(stages.stages)
    program = lowered(name, stages, microbatches, split=split)
    return simulate(program, stages, costs or equal_costs(count), where or alike(count), **how)


def lowered(name: str, stages: StageGraph, microbatches: int, *, split: bool = False) -> Program:
    placement = tuple(range(len(stages.stages)))
    return lower(registry.build(name, stages, placement, microbatches, split_backward=split), stages)


def memory(rank: int, timeline: Timeline) -> list[tuple[float, int]]:
    return changes(timeline.memory[rank])


def sized(**more: object) -> StageCost:
    static = {"parameters": 1000, "gradients": 1000}
    return replace(equal_costs(1, residual_bytes=100)[0], static_bytes=static, carried_bytes=30, **more)


def test_memory_of_one_stage() -> None:
    costs = (sized(transient_bytes={"F": 7, "B": 9, "STEP": 5}, step_s=1.0),)
    timeline = step("gpipe", chain(1), 2, costs)
    # From F0, F1, B0, B1 and STEP on, and at the end.
    sizes = [2107, 2207, 2209, 2109, 2005, 2000]
    assert memory(0, timeline) == list(zip((0.0, 1.0, 2.0, 4.0, 6.0, 7.0), sizes, strict=True))
    held = {kind: size for kind, size in timeline.peaks[0].items() if size}
    assert held == {"parameters": 1000, "gradients": 1000, "residuals": 200, "transient": 9}
    halves = step("gpipe", chain(1), 1, (sized(),), split=True)  # less between I and W
    assert memory(0, halves) == [(0.0, 2100), (2.0, 2030), (3.0, 2000)]
    evaluated = step("forward_only", chain(2), 1, (sized(),) * 2, alike(2, 4.0))
    assert memory(1, evaluated) == [(0.0, 2004), (3.0, 2000)]


def test_memory_of_messages() -> None:
    """Values of 4 bytes; a transfer takes 1 s; one receive posted ahead."""
    timeline = step("gpipe", chain(2), 1, where=alike(2, 4.0), receive_ahead=1)
    # F0 makes 4, and a buffer for the gradient is posted; the output is through; B0 is over.
    assert memory(0, timeline) == [(0.0, 8), (2.0, 4), (8.0, 0)]
    # A buffer is posted; B0 makes the gradient; B0 is over, and so is its input; the gradient is through.
    assert memory(1, timeline) == [(0.0, 4), (3.0, 8), (5.0, 4), (6.0, 0)]
    assert [p["boundary"] for p in timeline.peaks] == [8, 8]


def test_neighbours_on_one_rank_share_one_copy() -> None:
    """0F0 makes the value and 1B0 its gradient; the value goes at the end of 1B0, its gradient of 0B0."""
    timeline = simulated(registry.build("gpipe", chain(2), (0, 0), 1))
    assert memory(0, timeline) == [(0.0, 4), (2.0, 8), (4.0, 4), (6.0, 0)]


def test_summary() -> None:
    summary = summarise(step("gpipe", chain(2), 1))
    assert (summary.step_s, summary.bubble) == (6.0, 0.5)
    assert (summary.ranks[1].busy_s, summary.ranks[1].wait_s) == (3.0, 1.0)
    assert summarise(Timeline(source="measured", ranks=2, events=())).bubble == 0.0


@pytest.mark.parametrize(("costs", "ranks", "words"), [(1, 2, "1 stage costs"), (2, 1, "1 devices")])
def test_refuses_what_does_not_fit(costs: int, ranks: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        step("gpipe", chain(2), 1, equal_costs(costs), alike(ranks))


def test_a_program_that_blocks_is_refused_by_the_rule_that_it_breaks() -> None:
    late = "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP"
    first = "0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0B0 0RECV_B1<1 0B1 0STEP"
    with pytest.raises(DeadlockError, match="rank 0 at 0RECV_B0<1 needs 1SEND_B0>0"):
        simulate(parse_program(2, (0, 1), (first, late)), chain(2), equal_costs(2), alike(2))


def run(microbatches: int, *, small_bytes: int | None, caps: tuple[int, ...] = ()) -> Timeline:
    """GPipe on two ranks; a forward takes 1 s, a message of 4 bytes half a second."""
    return step("gpipe", chain(2), microbatches, where=alike(2, 8.0), caps=caps, small_bytes=small_bytes)


def held(timeline: Timeline, rank: int, at_s: float) -> int:
    """Bytes that a rank holds at some time."""
    curve = timeline.memory[rank]
    return [size for time, size in zip(curve.times_s, curve.sizes, strict=True) if time <= at_s][-1]


@pytest.mark.parametrize(
    ("m", "small_bytes", "at_s", "bytes_held"),
    # That of F0 is through at 1.5 s, in F1; besides it, 8 bytes to receive in, and the 4 that F1 makes.
    [(3, None, 1.75, 12), (3, 0, 1.75, 16), (3, 4, 1.75, 16), (4, 0, 3.75, 16), (4, 4, 3.75, 24)],
)
def test_a_message_is_held_until_the_action_ends_in_which_it_got_through(m, small_bytes, at_s, bytes_held):
    timeline = run(m, small_bytes=small_bytes)  # a small one until the step ends
    assert held(timeline, 0, at_s) == bytes_held and held(timeline, 0, timeline.step_s) == 0


def test_a_small_message_does_not_hold_the_large_ones_behind_it() -> None:
    """Rank 0 sends rank 1 the values of stage 0, of 4000 bytes, and those of stage 2, of 4."""
    large, *small = chain(4).crossings
    stages = replace(chain(4), crossings=(replace(large, value=replace(large.value, shape=(1000,))), *small))
    program = lower(registry.build("interleaved_1f1b", stages, (0, 1, 0, 1), 8), stages)
    kept, gone = (
        simulate(program, stages, equal_costs(4), alike(2, 8000.0), small_bytes=size) for size in (4, 0)
    )
    for rank in range(2):
        # At most 8 micro-batches, of each of which a rank sends two small values or gradients.
        assert gone.peak_bytes(rank) < kept.peak_bytes(rank) <= gone.peak_bytes(rank) + 8 * 2 * 4


def test_a_rank_waits_for_its_sends_before_it_passes_its_cap() -> None:
    free, late = (run(4, small_bytes=small).peak_bytes(0) for small in (None, 4))
    assert free < late
    assert run(4, small_bytes=4, caps=(late, late)).peak_bytes(0) == late
    assert run(4, small_bytes=4, caps=(late - 1, late)).peak_bytes(0) == free


# Times of single actions, and copies that take none.


def with_times(own_s: dict[Action, float]) -> Timeline:
    program = parse_program(1, (0,), ("0F0 0B0 0STEP",))
    return simulate(program, chain(1), equal_costs(1), alike(1), action_s=own_s)


def test_an_action_takes_its_own_time() -> None:
    assert with_times({}).step_s == 3.0 and with_times({Action(0, B, 0): 0.5}).step_s == 1.5


STRANGERS = [Action(0, F, 1), Action(1, F, 0)]
STRANGERS += [Action(0, kind, 0) for kind in (W, Kind("NOWHERE"), OFFLOAD, STEP, SEND_F)]


@pytest.mark.parametrize(
    ("action", "seconds", "words"),
    [
        *((action, 1.0, f"{action} is given .* but is no action of") for action in STRANGERS),
        *((Action(0, B, 0), bad, f"0B0 is to take {bad} s") for bad in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_strangers_and_times_that_are_none_are_refused(action: Action, seconds: float, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        with_times({action: seconds})


@pytest.mark.parametrize(("microbatches", "peak"), [(3, 16), (4, 24)])
def test_the_host_holds_what_has_come_and_not_left(microbatches: int, peak: int) -> None:
    """All but the last micro-batch, whose backward follows at once. Copies that take no time left before they
    had come, so the curve fell below zero."""
    policy = MemoryPolicy(stages=({"x": "offload"},))
    program = lower(registry.build("gpipe", chain(1), (0,), microbatches), chain(1), policy=policy)
    (cost,) = equal_costs(1)
    costs = (replace(cost, residual_bytes=8, offloaded_bytes=8),)
    (host,) = (c for c in simulate(program, chain(1), costs, alike(1)).memory if c.tier == "host")
    assert min(host.sizes) == 0 and max(host.sizes) == peak


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
