"""The list scheduler: compiled and interpreted alike, stretched schedules, few receives posted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from small import alike, simulated
from timed import shape

from pipeloom.checks.schedules import check
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules import registry
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import Shape, path_clock
from pipeloom.schedules.list_scheduler import engine, loop
from pipeloom.schedules.list_scheduler.choose import best, fastest, make, simulated_cost, stretched
from pipeloom.schedules.list_scheduler.tables import as_lists, tables_of
from pipeloom.simulator.summary import summarise


def recipes_of(name: str, s: Shape) -> list[Recipe]:
    family = registry.entry(name).recipe
    assert family is not None
    made = family(s)
    return [made] if isinstance(made, Recipe) else list(made)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6)])
@pytest.mark.parametrize("name", ["zb_2p", "zb_v", "v_min", "gis", "po", "looped_bfs", "hanayo"])
def test_compiled_and_interpreted_make_the_same(name: str, times: tuple[float, float, float]) -> None:
    s = shape(name, 4, 12, times=times, transfer_s=0.1)
    for recipe in recipes_of(name, s):
        found = []
        for form in (loop.order_all.compiled, loop.order_all.interpreted):
            problem = tables_of(s, recipe)
            t, state = problem.tables, problem.new_state()
            if form is loop.order_all.interpreted:
                t, state = as_lists(t), as_lists(state)
            for index in range(len(problem.streams.kinds)):
                loop.look.interpreted(t, state, index)
            found.append((form(t, state, s.ranks), problem.columns(state), list(map(float, state.start))))
        (one, rows, starts), (two, other_rows, other_starts) = found
        assert one == two and starts == other_starts and rows.same(other_rows)


@pytest.mark.parametrize("within", [0.0, 20.0, 80.0])
def test_a_run_ends_once_it_is_certain_to_take_too_long(within: float) -> None:
    s = shape("v_half", 4, 12)
    problem = tables_of(s, recipes_of("v_half", s)[0])
    full = engine.run(problem)
    assert full is not None and engine.run(problem, full.step_s) == full
    assert (engine.run(problem, within) is None) == (full.step_s > within)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6)])
@pytest.mark.parametrize("name", ["v_half", "v_min", "1f1b_v", "po", "hanayo", "chimera"])
def test_a_schedule_made_longer_by_repeating_its_steady_state_is_the_one_that_is_made_anew(
    name: str, times: tuple[float, float, float]
) -> None:
    few = shape(name, 4, 16, times=times)
    many = replace(few, microbatches=31)
    compared = 0
    for short, recipe in zip(recipes_of(name, few), recipes_of(name, many), strict=True):
        try:
            made = stretched(make(few, short), few, recipe, 31)
        except DeadlockError:
            continue
        if made is not None:
            rows = made.rows
            check(Schedule(name=name, microbatches=31, placement=few.placement, rows=rows), few.stages)
            anew = make(many, recipe)
            assert made.step_s == pytest.approx(anew.step_s) and made.peak == anew.peak
            compared += 1
    assert compared


@settings(max_examples=15)
@given(data=st.data())
def test_any_clock_that_repeats_gives_rows_that_can_run_in_the_time_it_says(data: st.DataObject) -> None:
    seconds, pace = st.sampled_from([0.5, 1.0, 1.3]), st.sampled_from([1.0, 1.5, 2.0])
    times = data.draw(st.tuples(seconds, seconds, seconds))
    s = shape("v_half", data.draw(st.integers(2, 5)), 12, times=times)
    clock = path_clock(s, (data.draw(pace),), (data.draw(pace),), real=data.draw(st.booleans()))
    recipe = Recipe(kinds="FIW", clock=clock, memory=s.ranks)
    made = stretched(make(s, recipe), s, recipe, 40)
    if made is not None:
        longer = replace(s, microbatches=40)
        again = make(longer, Recipe(kinds="FIW", rows=made.rows, fill=""))
        assert again.step_s <= made.step_s + 1e-6
        assert max(again.peak) <= s.ranks


def test_what_is_not_the_same_for_all_micro_batches_is_not_repeated() -> None:
    s = shape("v_half", 4, 8)
    clock = path_clock(s)
    late, last = (
        Recipe(kinds="FIW", clock=lambda stage, kind, b, m=m: clock(stage, kind, b) + (b >= m), memory=4)
        for m in (21, 31)
    )
    rows = Recipe(kinds="FIW", rows=make(s, late).rows, memory=4)
    for recipe in (late, last, rows, replace(late, clock=clock, before=lambda a, b: False)):
        assert stretched(make(s, recipe), s, recipe, 32) is None
    tight = Recipe(kinds="FIW", clock=clock, memory=3)
    assert stretched(make(s, replace(tight, memory=4)), s, tight, 32) is None


@given(
    name=st.sampled_from(["zb_2p", "zb_v", "v_min", "v_half", "gis", "po", "gis_h", "looped_bfs"]),
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 2),
    times=st.tuples(*[st.floats(0.2, 2.0)] * 3),
    transfer_s=st.floats(0.01, 3.0),
)
def test_orders_are_compared_by_what_the_simulator_says(
    name: str, ranks: int, rounds: int, times: tuple[float, float, float], transfer_s: float
) -> None:
    s = shape(name, ranks, rounds * ranks, times=times, transfer_s=transfer_s)
    scheduled = make(s, recipes_of(name, s)[0])
    cost, rows = simulated_cost(s, scheduled), scheduled.rows
    made = Schedule(name="", microbatches=rounds * ranks, placement=s.placement, rows=rows)
    timeline = simulated(made, s.costs, s.stages, alike(ranks, latency_s=transfer_s))
    assert cost is not None and cost[0] == pytest.approx(timeline.step_s, rel=1e-8)
    assert cost[1] == pytest.approx(summarise(timeline).span_s, rel=1e-8)


def test_a_family_may_try_fewer_recipes_for_many_micro_batches_than_for_few() -> None:
    """gis_g did with groups of 5 on 6 ranks, and a recipe was taken from a place behind the list's end."""

    def family(s: Shape) -> list[Recipe]:
        slow, good = (Recipe(kinds="FIW", clock=path_clock(s), memory=most) for most in (1, s.depth))
        return [slow] * 4 + [good] if s.microbatches <= 6 else [slow, slow, good]

    s = shape("zb_h1", 2, 9)
    assert fastest(s, family).step_s == best(s, family(s)).step_s
