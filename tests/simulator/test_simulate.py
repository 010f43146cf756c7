"""Timelines and memory curves worked out by hand."""

from __future__ import annotations

import pytest

from pipeloom.ir.cluster import Cluster, Device, Link
from pipeloom.ir.costs import StageCost, equal_costs
from pipeloom.ir.errors import DeadlockError, PlanError
from pipeloom.ir.flow import dag
from pipeloom.ir.schedule import Program, parse_program
from pipeloom.ir.stages import StageGraph, chain
from pipeloom.ir.timeline import Timeline
from pipeloom.lowering.passes import lower
from pipeloom.schedules import registry
from pipeloom.simulator.all_reduce import all_reduce_s
from pipeloom.simulator.simulate import simulate
from pipeloom.simulator.summary import describe, summarise


def cluster(ranks: int, bandwidth: float = float("inf"), latency: float = 0.0) -> Cluster:
    link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency)
    return Cluster(devices=(Device(name="any", memory_bytes=1),) * ranks, within_node=link)


def built(name: str, stages: StageGraph, microbatches: int, *, split: bool = False) -> Program:
    placement = tuple(range(len(stages.stages)))
    return lower(registry.build(name, stages, placement, microbatches, split_backward=split), stages)


def drawn(timeline: Timeline, width: int = 1) -> str:
    """Each rank's compute stream, one letter per `width` seconds: f, b, i, w, and . where idle."""
    rows = [["."] * round(timeline.step_s / width) for _ in range(timeline.ranks)]
    for event in timeline.events:
        if event.stream == "compute" and event.duration_s:
            letter = next(c for c in event.action if c.isalpha()).lower()
            for slot in range(round(event.start_s / width), round(event.end_s / width)):
                rows[event.rank][slot] = letter
    return "\n".join("".join(row) for row in rows)


def test_gpipe_drawn() -> None:
    assert (
        drawn(simulate(built("gpipe", chain(3), 3), chain(3), equal_costs(3), cluster(3)))
        == """\
fff......bbbbbb
.fff...bbbbbb..
..fffbbbbbb...."""
    )


def test_1f1b_drawn() -> None:
    assert (
        drawn(simulate(built("1f1b", chain(3), 4), chain(3), equal_costs(3), cluster(3)))
        == """\
fff....bbfbb.bb.bb
.ff..bbfbbfbb.bb..
..fbbfbbfbbfbb...."""
    )


def test_a_message_occupies_both_ranks() -> None:
    """4 bytes at 0.25 s each, within the message's own 2 s and after them: each rank loses a second."""
    link = Link(bandwidth_bytes_per_s=float("inf"), latency_s=2.0, overhead_s_per_byte=0.25)
    ranks = Cluster(devices=(Device(name="any", memory_bytes=1),) * 2, within_node=link)
    timeline = simulate(built("gpipe", chain(2), 2), chain(2), equal_costs(2), ranks)
    assert (
        drawn(timeline)
        == """\
f.f.........bb.bb
....f.fbb.bb....."""
    )


def test_split_backward_drawn() -> None:
    timeline = simulate(built("1f1b", chain(3), 3, split=True), chain(3), equal_costs(3), cluster(3))
    assert (
        drawn(timeline)
        == """\
fff..iw.iw.iw
.ff.iwfiw.iw.
..fiwfiwfiw.."""
    )


def test_diamond_drawn() -> None:
    diamond = dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    # The two branches run at the same time: as short as a chain of three.
    assert (
        drawn(simulate(built("1f1b", diamond, 3), diamond, equal_costs(4), cluster(4)))
        == """\
fff....bb.bb.bb
.ff..bbfbb.bb..
.ff..bbfbb.bb..
..fbbfbbfbb...."""
    )


def test_a_slower_device_holds_up_the_others() -> None:
    even = equal_costs(2)
    timeline = simulate(built("gpipe", chain(2), 2), chain(2), (even[0], even[1].slowed(2.0)), cluster(2))
    assert (
        drawn(timeline)
        == """\
ff.......bb..bb
.ffffbbbbbbbb.."""
    )


def events(timeline: Timeline, stream: str) -> list[tuple[int, str, float, float]]:
    return [(e.rank, e.action, e.start_s, e.end_s) for e in timeline.events if e.stream == stream]


def test_a_link_carries_one_message_at_a_time() -> None:
    """4 bytes at 1 byte/s with 1 s latency: 5 s each, while forwards take 1 s."""
    timeline = simulate(
        built("forward_only", chain(2), 3), chain(2), equal_costs(2), cluster(2, 1.0, 1.0), receive_ahead=3
    )
    assert events(timeline, "send") == [
        (0, "0SEND_F0>1", 1.0, 6.0),
        (0, "0SEND_F1>1", 6.0, 11.0),
        (0, "0SEND_F2>1", 11.0, 16.0),
    ]
    assert events(timeline, "recv") == [
        (1, "1RECV_F0<0", 0.0, 6.0),
        (1, "1RECV_F1<0", 7.0, 11.0),
        (1, "1RECV_F2<0", 12.0, 16.0),
    ]


def test_a_message_waits_until_its_receive_is_posted() -> None:
    costs = (equal_costs(1)[0], equal_costs(1)[0].slowed(10.0))
    program = built("forward_only", chain(2), 3)
    timeline = simulate(program, chain(2), costs, cluster(2, 4.0), receive_ahead=1)
    # The second receive is posted when the first message is taken, at 2 s; the third at 12 s.
    assert events(timeline, "send") == [
        (0, "0SEND_F0>1", 1.0, 2.0),
        (0, "0SEND_F1>1", 2.0, 3.0),
        (0, "0SEND_F2>1", 12.0, 13.0),
    ]
    assert timeline.step_s == 32.0


def test_waiting_out_of_order_posts_all_receives_up_to_the_one_waited_for() -> None:
    rows = ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F1<0 1F1 1RECV_F0<0 1F0")
    program = parse_program(2, (0, 1), rows)
    timeline = simulate(program, chain(2), equal_costs(2), cluster(2, 4.0), receive_ahead=1)
    assert events(timeline, "recv") == [(1, "1RECV_F1<0", 0.0, 3.0)]
    assert timeline.step_s == 5.0


def memory(rank: int, timeline: Timeline) -> list[tuple[float, int]]:
    """What is held from each time on, where it changes."""
    curve = timeline.memory[rank]
    last = dict(zip(curve.times_s, curve.sizes, strict=True))
    steps = list(last.items())
    return [s for i, s in enumerate(steps) if i == 0 or s[1] != steps[i - 1][1]]


def sized(**more: object) -> StageCost:
    return StageCost(
        forward_s=1.0,
        backward_s=2.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        static_bytes={"parameters": 1000, "gradients": 1000},
        residual_bytes=100,
        carried_bytes=30,
        **more,  # type: ignore[arg-type]
    )


def test_memory_of_one_stage() -> None:
    costs = (sized(transient_bytes={"F": 7, "B": 9, "STEP": 5}, step_s=1.0),)
    timeline = simulate(built("gpipe", chain(1), 2), chain(1), costs, cluster(1))
    assert memory(0, timeline) == [
        (0.0, 2107),  # F0
        (1.0, 2207),  # F1
        (2.0, 2209),  # B0
        (4.0, 2109),  # B1
        (6.0, 2005),  # STEP
        (7.0, 2000),
    ]
    assert timeline.peaks[0] == {
        "parameters": 1000,
        "gradients": 1000,
        "optimizer": 0,
        "buffers": 0,
        "batch": 0,
        "residuals": 200,
        "boundary": 0,
        "transient": 9,
    }


def test_memory_between_i_and_w() -> None:
    timeline = simulate(built("gpipe", chain(1), 1, split=True), chain(1), (sized(),), cluster(1))
    assert memory(0, timeline) == [(0.0, 2100), (2.0, 2030), (3.0, 2000)]


def test_memory_of_messages() -> None:
    """Values of 4 bytes; a transfer takes 1 s; one receive posted ahead."""
    costs = (StageCost(forward_s=1.0, backward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0),) * 2
    program = built("gpipe", chain(2), 1)
    timeline = simulate(program, chain(2), costs, cluster(2, 4.0), receive_ahead=1)
    assert memory(0, timeline) == [
        (0.0, 8),  # F0 makes 4, and a buffer for the gradient is posted
        (2.0, 4),  # the output is through
        (8.0, 0),  # B0 is over
    ]
    assert memory(1, timeline) == [
        (0.0, 4),  # a buffer for the input is posted
        (3.0, 8),  # B0 makes the gradient
        (5.0, 4),  # B0 is over, and so is its input
        (6.0, 0),  # the gradient is through
    ]
    assert [p["boundary"] for p in timeline.peaks] == [8, 8]


def test_neighbours_on_one_rank_share_one_copy() -> None:
    stages = chain(2)
    program = lower(registry.build("gpipe", stages, (0, 0), 1), stages)
    timeline = simulate(program, stages, equal_costs(2), cluster(1))
    assert memory(0, timeline) == [
        (0.0, 4),  # 0F0 makes the value
        (2.0, 8),  # 1B0 makes its gradient
        (4.0, 4),  # 1B0 is over: the value goes
        (6.0, 0),  # 0B0 is over: the gradient goes
    ]


def test_evaluation_keeps_nothing() -> None:
    program = built("forward_only", chain(2), 1)
    timeline = simulate(program, chain(2), (sized(), sized()), cluster(2, 4.0))
    assert memory(1, timeline) == [(0.0, 2004), (3.0, 2000)]


@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 2), (4, 8), (8, 16)])
def test_residuals_at_the_peak_are_those_in_flight(p: int, m: int) -> None:
    costs = equal_costs(p, residual_bytes=10**6)
    timeline = simulate(built("1f1b", chain(p), m), chain(p), costs, cluster(p))
    assert [peaks["residuals"] for peaks in timeline.peaks] == [10**6 * min(p - s, m) for s in range(p)]


def test_tied_gradients_are_summed_when_both_ranks_are_there() -> None:
    tied = dag(3, [(0, 1), (1, 2)], params={0: ("wte",), 2: ("wte",)})
    costs = equal_costs(3)
    end = StageCost(
        forward_s=1.0,
        backward_s=2.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        step_s=3.0,
        tied_bytes={"wte": 8},
    )
    timeline = simulate(built("gpipe", tied, 1), tied, (end, costs[1], end), cluster(3, float("inf"), 0.5))
    # Forwards and backwards with their transfers end at 3 + 4 * 0.5 + 6 = 11 s on rank 0, at 6 s on rank 2.
    assert [e for e in events(timeline, "recv") if "REDUCE" in e[1]] == [
        (2, "2REDUCE", 6.0, 12.0),
        (0, "0REDUCE", 11.0, 12.0),
    ]
    assert timeline.step_s == 15.0


def test_all_reduce_times() -> None:
    three = cluster(3, 2.0, 1.0)
    assert all_reduce_s(12, (0,), three) == 0.0
    assert all_reduce_s(12, (0, 2), three) == 8.0
    assert all_reduce_s(12, (0, 1, 2), three) == 12.0


def test_summary() -> None:
    timeline = simulate(built("gpipe", chain(2), 1), chain(2), equal_costs(2), cluster(2))
    assert describe(summarise(timeline)) == (
        "step 6.0000 s, bubble 50.0 %\n"
        "rank 0: busy 3.0000 s, waits 3.0000 s, peak 0.0 MiB\n"
        "rank 1: busy 3.0000 s, waits 1.0000 s, peak 0.0 MiB"
    )
    assert summarise(Timeline(source="measured", ranks=2, events=())).bubble == 0.0


def test_refuses_what_does_not_fit() -> None:
    program = built("gpipe", chain(2), 1)
    with pytest.raises(PlanError, match="1 stage costs and 2 stages for a program of 2 stages"):
        simulate(program, chain(2), equal_costs(1), cluster(2))
    with pytest.raises(PlanError, match="the program has 2 ranks, the cluster 1 devices"):
        simulate(program, chain(2), equal_costs(2), cluster(1))
    with pytest.raises(PlanError, match="0 receives posted ahead"):
        simulate(program, chain(2), equal_costs(2), cluster(2), receive_ahead=0)


def test_a_program_that_blocks_is_refused_by_the_rule_that_it_breaks() -> None:
    late = "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP"
    first = "0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0B0 0RECV_B1<1 0B1 0STEP"
    with pytest.raises(DeadlockError, match="rank 0 at 0RECV_B0<1 needs 1SEND_B0>0"):
        simulate(parse_program(2, (0, 1), (first, late)), chain(2), equal_costs(2), cluster(2))
