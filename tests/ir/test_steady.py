"""Steady steps: what a schedule without a flush repeats, how it is unrolled, and how long a step takes."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from small import alike, simulated

from pipeloom.ir.action import B
from pipeloom.ir.costs import equal_costs
from pipeloom.ir.errors import ScheduleError
from pipeloom.ir.operation import Operation, declare
from pipeloom.ir.schedule import Schedule, parse_rows
from pipeloom.ir.stages import chain
from pipeloom.ir.steady import SteadyStep, parse_steady, steady_step
from pipeloom.ir.weight_policies import Updates
from pipeloom.lowering.passes import lower
from pipeloom.lowering.steady import SteadyRows
from pipeloom.schedules import registry
from pipeloom.schedules.registry import build_steady
from pipeloom.simulator.layout import layout_of
from pipeloom.simulator.simulate import simulate


def built(name: str, ranks: int, every: int, policy: str = "2bw"):
    stages, placement = registry.default_placement(name, ranks)
    return stages, build_steady(name, stages, placement, Updates(policy=policy, every=every))


def test_unrolled_1f1b_is_1f1b_over_all_micro_batches():
    stages, body = built("1f1b", 4, 8)
    assert body.unroll(5).rows == registry.build("1f1b", stages, (0, 1, 2, 3), 40).rows
    again = parse_steady(tuple(str(body).splitlines()), name="1f1b", microbatches=8, placement=(0, 1, 2, 3))
    assert again == body


@pytest.mark.parametrize(
    ("name", "every", "words"),
    [
        ("1f1b", 2, "have 3 micro-batches"),  # two fewer than stages
        *((name, 8, "does not repeat|newest there is 0") for name in ("gpipe", "po", "looped_bfs")),
    ],
)
def test_schedules_that_do_not_repeat_are_refused(name, every, words):
    with pytest.raises(ScheduleError, match=words):
        built(name, 4, every)


@pytest.mark.parametrize("policy", ["2bw", "stash"])
@pytest.mark.parametrize("name", ["zb_v", "hanayo"])
def test_stages_of_a_rank_that_are_at_different_updates_are_refused(name, policy):
    """A rank updates all its stages at once: the gradient of one was added to the update before its own."""
    with pytest.raises(ScheduleError, match="update before"):
        built(name, 2, 8, policy)


def test_rows_outside_the_window_are_refused():
    with pytest.raises(ScheduleError, match="at least 4 steps"):
        steady_step(Schedule(name="", microbatches=2, placement=(0,), rows=((),)), 1)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_a_steady_step_has_no_bubble(name, clips):
    """F = I = W = 1, free messages: a step of m micro-batches takes 3 m v on each rank, and no more."""
    stages, body = built(name, 4, 8)
    program = lower(body.unrolled, stages, updates=Updates(policy="2bw", every=8), clips=clips)
    count = len(stages.stages)
    timeline = simulate(program, stages, equal_costs(count), alike(4, 1e18))
    assert timeline.step_s == pytest.approx(3 * 8 * count / 4)
    assert timeline.bubble == pytest.approx(0.0, abs=1e-6)
    flushed = registry.build(name, stages, body.placement, 8)
    assert timeline.step_s < simulated(flushed, stages=stages).step_s


@pytest.mark.parametrize(("name", "ranks", "every"), [("zb_h2", 3, 1), ("1f1b", 8, 1), ("zb_h1", 8, 2)])
def test_a_step_and_its_peaks_are_those_of_a_full_pipeline_however_long_it_takes_to_fill(name, ranks, every):
    stages, body = built(name, ranks, every, "stash")
    updates, costs = Updates(policy="stash", every=every), equal_costs(ranks)

    def timeline(schedule):
        return simulate(lower(schedule, stages, updates=updates), stages, costs, alike(ranks, 1e18))

    assert body.window > 3
    judged, many = timeline(body.unrolled), timeline(body.unroll(8 * body.window))
    assert judged.step_s == pytest.approx(3 * every) == many.step_s
    assert judged.rank_peaks == many.rank_peaks


def test_steps_stand_where_the_gradients_are_complete_and_sums_are_awaited_late():
    stages, body = built("1f1b", 2, 2)
    updates = Updates(policy="2bw", every=2)
    rows = [str(lower(body.unroll(3), stages, updates=updates, clips=c)).splitlines() for c in (False, True)]
    computed = [
        [" ".join(word for word in row.split() if "SEND" not in word and "RECV" not in word) for row in both]
        for both in rows
    ]
    assert computed[0] == [
        "0F0 0F1 0B0 0F2 0B1 0STEP0 0F3 0B2 0F4 0B3 0STEP1 0F5 0B4 0B5 0STEP2",
        "1F0 1B0 1F1 1B1 1STEP0 1F2 1B2 1F3 1B3 1STEP1 1F4 1B4 1F5 1B5 1STEP2",
    ]
    assert computed[1] == [
        "0F0 0F1 0B0 0F2 0B1 0REDUCE0 0F3 0B2 0STEP0 0F4 0B3 0REDUCE1 0F5 0B4 0B5 0STEP1 0REDUCE2 0STEP2",
        "1F0 1B0 1F1 1B1 1REDUCE0 1F2 1B2 1F3 1B3 1STEP0 1REDUCE1 1F4 1B4 1F5 1B5 1STEP1 1REDUCE2 1STEP2",
    ]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("policy", ["2bw", "stash"])
def test_small_messages_are_held_to_the_end_of_their_own_step(policy, clips):
    """So ten steps hold no more than five, and more than where each is let go of when it is through."""
    stages, body = built("1f1b", 2, 4, policy)
    updates = Updates(policy=policy, every=4)

    def peaks(steps, small_bytes):
        program = lower(body.unroll(steps), stages, updates=updates, clips=clips)
        timeline = simulate(program, stages, equal_costs(2), alike(2, 8.0), small_bytes=small_bytes)
        return [timeline.peak_bytes(rank) for rank in range(2)]

    few, many, none_held = peaks(5, 4), peaks(10, 4), peaks(10, 0)
    assert few == many
    assert all(held > free for held, free in zip(many, none_held, strict=True))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_simulator_cuts_a_row_into_the_steps_that_a_run_has(ranks, clips):
    stages, body = built("1f1b", ranks, 4)
    updates = Updates(policy="2bw", every=4)
    program = lower(body.unroll(6), stages, updates=updates, clips=clips)
    layout = layout_of(program, stages, equal_costs(ranks), alike(ranks), receive_ahead=2, action_s={})
    steady = SteadyRows(step=body, stages=stages, updates=updates, clips=clips)
    for rank, (low, high) in enumerate(pairwise(program.columns.offsets.tolist())):
        begins = np.flatnonzero(layout.step_begins[low:high]).tolist()
        run = [len(steady.row(step, step).program.rows[rank]) for step in range(5)]
        assert begins[:5] == list(accumulate(run))


def test_receives_are_posted_once_their_step_has_begun():
    """With a micro-batch per step there is never more than one to post, however many would be ahead."""
    stages, body = built("1f1b", 2, 1)
    program = lower(body.unroll(6), stages, updates=Updates(policy="2bw", every=1))
    one, two = (
        simulate(program, stages, equal_costs(2), alike(2, 8.0), receive_ahead=ahead) for ahead in (1, 2)
    )
    assert [one.peak_bytes(rank) for rank in range(2)] == [two.peak_bytes(rank) for rank in range(2)]
    assert one.events == two.events


def test_an_operation_on_gradients_runs_before_their_update():
    """The update waits for it, beside computing too; behind gradients of the next one it is refused."""
    declare(Operation(letters="ZIP", meaning="compression", after=B, stream="host", seconds=10.0))
    updates, stages = Updates(policy="2bw", every=1), chain(1)
    body = SteadyStep(name="", microbatches=1, placement=(0,), rows=parse_rows(("0F1 0B0 0ZIP0",)))
    program = lower(body.unroll(3), stages, updates=updates)
    assert str(program) == "0F0 0F1 0B0 0ZIP0 0STEP0 0F2 0B1 0ZIP1 0STEP1 0B2 0ZIP2 0STEP2"
    rows = SteadyRows(step=body, stages=stages, updates=updates)
    assert str(rows.row(2, 2).program) == "0F0 0B1 0ZIP1 0STEP1"
    starts = {e.action: e.start_s for e in simulate(program, stages, equal_costs(1), alike(1)).events}
    assert starts["0STEP0"] == 14  # from 4 to 14 its gradients are compressed
    late = replace(body, rows=parse_rows(("0F2 0B1 0ZIP0",)), window=3)
    with pytest.raises(ScheduleError, match="0ZIP0 after"):
        lower(late.unroll(4), stages, updates=updates)
