"""Schedules made longer by repeating their steady state are those that the list scheduler makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from timed import shape

from pipeloom.checks.schedules import check
from pipeloom.ir.errors import DeadlockError
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules import registry
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.language.shape import path_clock
from pipeloom.schedules.list_scheduler.choose_recipe import make
from pipeloom.schedules.list_scheduler.stretch import stretched


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.6)])
@pytest.mark.parametrize("name", ["v_half", "v_min", "1f1b_v", "po", "hanayo", "chimera"])
def test_a_longer_schedule_is_the_one_that_is_made_anew(name: str, times: tuple[float, float, float]) -> None:
    few = shape(name, 4, 16, times=times)
    many = replace(few, microbatches=31)
    family = registry.entry(name).recipe
    assert family is not None
    pairs = zip(list(family(few)), list(family(many)), strict=True)  # type: ignore[arg-type]
    compared = 0
    for short, recipe in pairs:
        try:
            made = stretched(make(few, short), few, recipe, 31)
        except DeadlockError:
            continue
        if made is None:
            continue
        outcome = made.outcome
        anew = make(many, recipe).outcome
        rows = Schedule(name=name, microbatches=31, placement=few.placement, rows=outcome.rows)
        check(rows, few.stages)
        assert outcome.step_s == pytest.approx(anew.step_s)
        assert outcome.peak == anew.peak
        compared += 1
    assert compared


@settings(max_examples=15, deadline=None)
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
        again = make(longer, Recipe(kinds="FIW", rows=made.outcome.rows, fill="")).outcome
        assert again.step_s <= made.outcome.step_s + 1e-6
        assert max(again.peak) <= s.ranks


def test_what_is_not_the_same_for_all_micro_batches_is_not_repeated() -> None:
    s = shape("v_half", 4, 8)
    clock = path_clock(s)
    late = Recipe(kinds="FIW", clock=lambda stage, kind, b: clock(stage, kind, b) + (b > 20), memory=4)
    rows = Recipe(kinds="FIW", rows=make(s, late).outcome.rows, memory=4)
    for recipe in (late, rows, replace(late, clock=clock, before=lambda a, b: False)):
        assert stretched(make(s, recipe), s, recipe, 32) is None
    tight = Recipe(kinds="FIW", clock=clock, memory=3)
    assert stretched(make(s, replace(tight, memory=4)), s, tight, 32) is None
