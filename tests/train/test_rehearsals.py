"""When a run rehearses, and what it holds each rehearsal against."""

import re

import pytest
from drawings import computing
from hypothesis import given, strategies as st

from pipeloom.ir.timeline import Timeline
from pipeloom.train.rehearsals import (
    AFTER,
    BEFORE,
    RehearsalComparison,
    RehearsalWindow,
    StepRehearsals,
    rehearsal_steps,
)


def step(source: str, seconds: float) -> Timeline:
    return computing((0, "0F0", 0.0, seconds), source=source)


class Machine:
    """Its pace drifts: step n and what is rehearsed before it take pace(n) seconds; one step is disturbed."""

    drains_each_step = True

    def __init__(self, disturbed: int = -1) -> None:
        self.now, self.disturbed, self.measurements = 0, disturbed, 0

    def pace(self) -> float:
        return 1.0 + self.now / 50

    def rehearse(self) -> Timeline:
        return step("predicted", self.pace())

    def measured(self) -> Timeline:
        self.measurements += 1
        return step("measured", 9.0 if self.now == self.disturbed else self.pace())


def run(machine: Machine, first: int, end: int, rehearsals: int = 21) -> StepRehearsals:
    pace = StepRehearsals(machine, first=first, end=end, rehearsals=rehearsals)
    for machine.now in range(first, end):
        predicted = pace.before(machine.now)
        assert predicted in (None, machine.pace())
        pace.after(machine.now)
    return pace


def test_a_drifting_pace_is_no_error_of_the_prediction() -> None:
    """From the first step to the last the machine slows down ninefold; one step is disturbed besides."""
    comparison = run(machine := Machine(disturbed=203), 0, 400).comparison
    assert machine.measurements == 21 * (BEFORE + AFTER)  # of the steps around rehearsals only
    assert comparison is not None and len(comparison.windows) == 21
    assert abs(comparison.middle.error) < 0.01
    assert comparison.windows[0].predicted.step_s < comparison.windows[-1].predicted.step_s / 5
    assert all(abs(window.error) < 0.05 for window in comparison.windows)


@given(first=st.integers(0, 1000), steps=st.integers(1, 600), most=st.integers(1, 40))
def test_rehearsals_are_few_apart_and_have_steps_around_them(first: int, steps: int, most: int) -> None:
    planned = rehearsal_steps(first, first + steps, most)
    assert len(planned) % 2 == 1 and len(planned) <= max(1, most)
    assert first <= planned[0] and planned[-1] < first + steps
    assert all(later - one >= BEFORE + AFTER for one, later in zip(planned, planned[1:], strict=False))
    if steps >= 8:
        assert len(planned) <= max(1, steps // 8)
    if steps <= 60:
        comparison = run(Machine(), first, first + steps, most).comparison
        assert comparison is not None and [w.step for w in comparison.windows] == list(planned)
        if steps >= 8 or steps == 1:
            assert {window.steps for window in comparison.windows} == {min(BEFORE + AFTER, steps)}


def test_the_first_step_in_which_optimizers_make_their_state_stands_for_no_run_of_several() -> None:
    for steps in range(2, 9):
        measured = run(Machine(disturbed=0), 0, steps).measured
        assert measured is not None and measured.step_s < 2.0
        (window, *_) = run(Machine(disturbed=0), 0, steps).comparison.windows
        assert window.steps <= steps - 1


def test_without_rehearsals_the_last_step_stands_for_the_run() -> None:
    machine = Machine()
    pace = run(machine, 0, 10, rehearsals=0)
    assert pace.comparison is None and machine.measurements == 1
    assert pace.measured is not None and pace.measured.step_s == 1.0 + 9 / 50
    nothing = run(Machine(), 10, 10)
    assert nothing.comparison is None and nothing.measured is None


def test_the_middle_of_all_rehearsals_is_told() -> None:
    def compared(*errors: float) -> RehearsalComparison:
        windows = (
            RehearsalWindow(step=5 * i, steps=5, predicted=step("", 1 + error), measured=step("", 1))
            for i, error in enumerate(errors, 1)
        )
        return RehearsalComparison(windows=tuple(windows))

    one, many = compared(-0.021), compared(0.3, -0.1, 0.0, 0.02, 0.01)
    assert one.quartiles is None and re.search("one rehearsal after 5 steps.* off by -2.1%$", str(one))
    assert many.middle.step == 25 and many.quartiles == pytest.approx((0.0, 0.02))
    assert re.search(r"^5 rehearsals after 5 to 25 steps.* \+1.0% .* \+0.0% to \+2.0%", str(many))
