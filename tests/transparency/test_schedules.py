"""Every synchronous schedule of the library gives the numbers of plain PyTorch."""

from dataclasses import replace
from functools import cache

import nets
import pytest
from delayed import steady_plan
from every_schedule import LACKING, SYNCHRONOUS, gpt_job, plan_of
from odd.case import job as job_of
from odd.control_flow import JOBS
from odd.state import SmallEmbeddings
from runs import Numbers, assert_same, even_plan, pipelined, plain

from pipeloom import Job, Options, Pipeline, verify
from pipeloom.ir.errors import PlanError, ScheduleError
from pipeloom.ir.plan import Plan, StagePlan, widened
from pipeloom.runnable import require_runnable
from pipeloom.schedules import registry

TOLERANCE = 1e-12  # in float64: what remains is the order of additions
BOTH_WAYS = [name for name in SYNCHRONOUS if registry.entry(name).place == "both ways"]
GPT = gpt_job()


@cache
def one_process() -> Numbers:
    """Four micro-batches of one row, one step."""
    batches = [GPT.batch(0, 4)]
    return plain(GPT, batches, 4, evaluate=batches)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_trains_and_evaluates_as_one_process(name: str) -> None:
    batches = [GPT.batch(0, 4)]
    found = pipelined(GPT, plan_of(GPT, name, 2, microbatches=4), batches, evaluate=batches)
    assert_same(found, one_process(), tolerance=TOLERANCE)


@pytest.mark.sampled(*(f"{name}-3" for name in BOTH_WAYS))
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_trains_as_one_process_on_more_ranks(name: str, ranks: int) -> None:
    """Two steps: the second uses what the first updated. With three ranks two directions meet on the middle
    one, which then has both replicas of a stage."""
    batches = [GPT.batch(seed, 4 * ranks) for seed in range(2)]
    plan = plan_of(GPT, name, ranks, microbatches=2 * ranks)
    if name in BOTH_WAYS and ranks == 3:
        assert plan.placement == (0, 1, 2, 2, 1, 0)
    found = pipelined(GPT, plan, batches, clip_norm=0.05, evaluate=batches[:1])
    expected = plain(GPT, batches, 2 * ranks, clip_norm=0.05, evaluate=batches[:1])
    assert_same(found, expected, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", LACKING)
def test_what_the_runtime_lacks_is_said_before_anything_starts(name: str) -> None:
    """No model is built, and no other rank is waited for."""
    unmade = replace(GPT, model=lambda: pytest.fail("the model was built"))
    shape = {"placement": (0, 1), "stages": (StagePlan(ops=("a",)),) * 2, "microbatches": 4}
    plan = Plan(graph="", planner="test", schedule=name, schedule_rows=("", ""), **shape)
    reason = f"schedule {name} cannot be run: it needs {registry.entry(name).lacks}, which the runtime"
    for run in (Pipeline, verify):
        with pytest.raises(ScheduleError, match=reason):
            run(unmade, plan)
    with pytest.raises(ScheduleError, match="schedule seq1f1b cannot be run"):
        require_runnable("seq_1f1b")  # another of its names


def test_without_backwards_a_pipeline_evaluates_and_does_not_train() -> None:
    plan = plan_of(GPT, "forward_only", 2, microbatches=4)
    found = pipelined(GPT, plan, [], evaluate=[GPT.batch(0, 4)])
    untrained = plain(GPT, [], 4, evaluate=[GPT.batch(0, 4)])
    assert found.evaluated == pytest.approx(untrained.evaluated, rel=TOLERANCE)
    for train in (lambda: pipelined(GPT, plan, [GPT.batch(0, 4)]), lambda: verify(GPT, plan)):
        with pytest.raises(ScheduleError, match="schedule forward_only has no backwards: it cannot train"):
            train()


def test_replicas_do_not_update_the_same_buffer() -> None:
    job = nets.job("convnet")
    with pytest.raises(PlanError, match="runs each stage on two ranks, but the forward updates"):
        pipelined(job, plan_of(job, "chimera", 2, microbatches=2), [job.batch(0, 2)])


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_a_parameter_that_the_forward_changes_has_one_copy(weights: str) -> None:
    """Replicas, and versions of the weights, went apart without a word."""
    job = job_of(SmallEmbeddings)
    plan = steady_plan(job, 2, 2) if weights == "2bw" else widened(even_plan(job, 2, microbatches=2), 2)
    with pytest.raises(PlanError, match="changes the parameter words.weight"):
        pipelined(job, plan, [job.batch(0, 8)])


SEVERAL_STAGES = ["interleaved_1f1b", "zb_v", "v_half", "hanayo", "chimera", "dualpipe"]
"""Schedules with several stages per rank, or with replicas."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_dropout_draws_the_same_numbers(name: str) -> None:
    """Whichever replica runs a micro-batch, its masks are those of the uncut graph."""
    job = nets.with_dropout("gpt")
    result = verify(job, plan_of(job, name, 2, microbatches=4), options=Options(seed=3))
    result.require()
    assert result.reference.startswith("the module itself, eager")


OTHERS = {
    "llama": (nets.job("llama", double=True), 4),
    "T5, whose decoder stages all read the encoder": (nets.job("t5", double=True), 4),
    "uneven micro-batches": (nets.job("gpt", double=True), 11),
    "cut between modules": (nets.in_double(JOBS["skips"]), 8),
    "branches between modules": (nets.in_double(JOBS["branch between blocks"]), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize(("job", "rows"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_other_models_and_batches(name: str, job: Job, rows: int) -> None:
    batches = [job.batch(seed, rows) for seed in range(2)]
    plan = plan_of(job, name, 2, microbatches=4, microbatch_size=1 if rows == 4 else 2)
    found = pipelined(job, plan, batches, evaluate=batches[:1], clip_norm=0.1)
    expected = plain(job, batches, 4, evaluate=batches[:1], clip_norm=0.1)
    assert_same(found, expected, tolerance=1e-11)
