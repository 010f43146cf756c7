"""Random models, cut at random places into stages that form a DAG, on any ranks, by random schedules."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from programs import Cut, Step, cuts, job_of, steps
from runs import assert_same, capture_of, even_plan, pipelined, plain, plan_for

from pipeloom import Job
from pipeloom.ir.plan import Plan

SCHEDULES = st.sampled_from(["1f1b", "gpipe"])
CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
QUICK = settings(max_examples=3, **CALM)
LONG = settings(max_examples=80, **CALM)


def plan_of(job: Job, cut: Cut, schedule: str, split: bool, microbatches: int) -> Plan:
    how = {"microbatches": microbatches, "split": split, "placement": cut.placement}
    return plan_for(capture_of(job), cut.stage_of, schedule=schedule, **how)


def check(data: st.DataObject, program: Sequence[Step], *, random: bool) -> None:
    job = job_of(program)
    cut = data.draw(cuts(capture_of(job).graph))
    microbatches = data.draw(st.integers(1, 3), label="micro-batches")
    plan = plan_of(job, cut, data.draw(SCHEDULES), data.draw(st.booleans(), label="split"), microbatches)
    batches = [job.batch(seed, 2 * microbatches + 1) for seed in range(2)]
    found = pipelined(job, plan, batches)
    if random:
        expected = pipelined(job, even_plan(job, 1, microbatches=microbatches), batches)
    else:
        expected = plain(job, batches, microbatches)
    assert_same(found, expected, tolerance=1e-11)


@QUICK
@given(st.data(), steps())
def test_some_programs(data: st.DataObject, program: list[Step]) -> None:
    check(data, program, random=False)


@pytest.mark.slow
@LONG
@given(st.data(), steps())
def test_programs(data: st.DataObject, program: list[Step]) -> None:
    check(data, program, random=False)


@pytest.mark.slow
@QUICK
@given(st.data(), steps(random=True))
def test_some_programs_that_draw(data: st.DataObject, program: list[Step]) -> None:
    """Against the same program uncut, which draws the same numbers."""
    check(data, program, random=True)


@pytest.mark.slow
@LONG
@given(st.data(), steps(random=True))
def test_programs_that_draw(data: st.DataObject, program: list[Step]) -> None:
    check(data, program, random=True)
