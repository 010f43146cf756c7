"""Random models, cut at random places into stages that form a DAG, on any ranks: the numbers of one process.
Any mix of kept, recomputed and offloaded residuals: the same bits."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, strategies as st
from programs import cuts, job_of, policies, steps
from runs import assert_same, assert_same_bits, capture_of, even, even_plan, pipelined, plain, plan_for
from trials import examples

from pipeloom import Job
from pipeloom.ir.stages import cut
from pipeloom.tracer.stage.trace import stage_residuals

CALM = {"phases": (Phase.explicit, Phase.generate), "suppress_health_check": [HealthCheck.data_too_large]}


@pytest.mark.sampled("False")
@pytest.mark.parametrize("random", [False, True])
@examples(2, 25, **CALM)
@given(data=st.data())
def test_cuts(data: st.DataObject, random: bool) -> None:
    """Programs that draw random numbers are compared with themselves uncut, as they draw the same ones."""
    job = job_of(data.draw(steps(random=random), label="program"))
    made = data.draw(cuts(capture_of(job).graph))
    microbatches = data.draw(st.integers(1, 3), label="micro-batches")
    plan = plan_for(
        capture_of(job),
        made.stage_of,
        microbatches=microbatches,
        schedule=data.draw(st.sampled_from(["1f1b", "gpipe"])),
        split=data.draw(st.booleans(), label="split"),
        placement=made.placement,
    )
    batches = [job.batch(seed, 2 * microbatches + 1) for seed in range(2)]
    uncut = even_plan(job, 1, microbatches=microbatches)
    expected = pipelined(job, uncut, batches) if random else plain(job, batches, microbatches)
    assert_same(pipelined(job, plan, batches), expected, tolerance=1e-11)


SCHEDULES = [
    ("gpipe", False, (0, 1)),
    ("1f1b", False, (0, 1, 2)),
    ("1f1b", True, (0, 1)),
    ("zb_h1", True, (0, 1)),
    ("zb_v", True, (0, 1, 1, 0)),
    ("interleaved_1f1b", False, (0, 1, 0, 1)),
]


def compare_policies(job: Job, data: st.DataObject) -> None:
    schedule, split, placement = data.draw(st.sampled_from(SCHEDULES))
    microbatches = data.draw(st.sampled_from([2, 4, 6]))
    captured = capture_of(job)
    stage_of = even(captured.graph, len(placement))
    stages = cut(captured.graph, stage_of)
    if len(stages.stages) < len(placement):
        return
    plan = plan_for(
        captured, stage_of, microbatches=microbatches, schedule=schedule, split=split, placement=placement
    )
    policy = data.draw(policies([stage_residuals(captured, stages, s) for s in range(len(placement))]))
    batches = [job.batch(seed, 2 * microbatches) for seed in (1, 2)]
    expected = pipelined(job, plan, batches)
    assert_same_bits(pipelined(job, replace(plan, memory=policy), batches), expected)


@examples(2, 10, **CALM)
@given(data=st.data())
def test_policies(data: st.DataObject) -> None:
    compare_policies(job_of(data.draw(steps(random=True))), data)
