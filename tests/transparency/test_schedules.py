"""Every synchronous schedule of the library gives the numbers of plain PyTorch."""

from dataclasses import replace

import pytest
import zoo
from every_schedule import LACKING, SYNCHRONOUS, gpt_job, plan_of
from runs import Numbers, assert_same, pipelined, plain

from pipeloom import Job, Pipeline, verify
from pipeloom.ir.errors import PlanError, ScheduleError
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.schedules import registry

TOLERANCE = 1e-12
"""In float64: what remains is the order of additions."""
BOTH_WAYS = [name for name in SYNCHRONOUS if registry.entry(name).place == "both ways"]


@pytest.fixture(scope="module")
def gpt() -> Job:
    return gpt_job()


@pytest.fixture(scope="module")
def expected(gpt: Job) -> Numbers:
    """Four micro-batches of one row, one step."""
    batches = [gpt.batch(0, 4)]
    return plain(gpt, batches, 4, evaluate=batches)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_trains_and_evaluates_as_one_process(gpt: Job, expected: Numbers, name: str) -> None:
    batches = [gpt.batch(0, 4)]
    found = pipelined(gpt, plan_of(gpt, name, 2, microbatches=4), batches, evaluate=batches)
    assert_same(found, expected, tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_trains_as_one_process_on_more_ranks(gpt: Job, name: str, ranks: int) -> None:
    """Two steps: the second uses what the first updated."""
    batches = [gpt.batch(seed, 4 * ranks) for seed in range(2)]
    found = pipelined(gpt, plan_of(gpt, name, ranks, microbatches=2 * ranks), batches)
    assert_same(found, plain(gpt, batches, 2 * ranks), tolerance=TOLERANCE)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_both_replicas_of_a_stage_on_one_rank(gpt: Job, name: str) -> None:
    """With three ranks the two directions meet on the middle one."""
    plan = plan_of(gpt, name, 3, microbatches=4)
    assert plan.placement == (0, 1, 2, 2, 1, 0) and len(plan.stages) == 3
    batches = [gpt.batch(seed, 4) for seed in range(2)]
    found = pipelined(gpt, plan, batches, clip_norm=0.05, evaluate=batches[:1])
    assert_same(found, plain(gpt, batches, 4, clip_norm=0.05, evaluate=batches[:1]), tolerance=TOLERANCE)


@pytest.mark.parametrize("name", LACKING)
def test_what_the_runtime_lacks_is_said_before_anything_starts(gpt: Job, name: str) -> None:
    """No model is built, and no other rank is waited for."""
    unmade = replace(gpt, model=lambda: pytest.fail("the model was built"))
    plan = Plan(
        graph="",
        planner="test",
        stages=(StagePlan(ops=("a",)),) * 2,
        placement=(0, 1),
        schedule=name,
        schedule_rows=("", ""),
        microbatches=4,
    )
    reason = f"schedule {name} cannot be run: it needs {registry.entry(name).lacks}, which the runtime"
    with pytest.raises(ScheduleError, match=reason):
        Pipeline(unmade, plan)
    with pytest.raises(ScheduleError, match=reason):
        verify(unmade, plan)


def test_without_backwards_a_pipeline_evaluates_and_does_not_train(gpt: Job, expected: Numbers) -> None:
    plan = plan_of(gpt, "forward_only", 2, microbatches=4)
    found = pipelined(gpt, plan, [], evaluate=[gpt.batch(0, 4)])
    untrained = plain(gpt, [], 4, evaluate=[gpt.batch(0, 4)])
    assert found.evaluated == pytest.approx(untrained.evaluated, rel=TOLERANCE)
    for train in (lambda: pipelined(gpt, plan, [gpt.batch(0, 4)]), lambda: verify(gpt, plan)):
        with pytest.raises(ScheduleError, match="schedule forward_only has no backwards: it cannot train"):
            train()


def test_replicas_do_not_update_the_same_buffer(gpt: Job) -> None:
    job = zoo.job("convnet")
    with pytest.raises(PlanError, match="runs each stage on two ranks, but the forward updates"):
        pipelined(job, plan_of(job, "chimera", 2, microbatches=2), [job.batch(0, 2)])
