"""Of one row a model may lack ops that it has of several: `step` named two fingerprints and gave up, where
`evaluate` went on."""

from functools import partial

import nets
import pytest
from odd.case import job
from odd.values import CountsRows
from runs import assert_same, even_plan, pipelined, plain, treated_plan

from pipeloom import Job
from pipeloom.ir.errors import BatchError
from pipeloom.ir.plan import Plan

GPT = Job(
    model=partial(nets.GPT, 8, 1),
    batch=nets.token_batch,
    optimizer=nets.sgd,
    name="gpt",
)


def check(job: Job, plan: Plan) -> None:
    """The last batch of an epoch leaves micro-batches of 2, 1 and 1 rows."""
    batches = [job.batch(0, 6), job.batch(1, 4), job.batch(2, 6)]
    found = pipelined(job, plan, batches, evaluate=batches[1:2])
    assert_same(found, plain(job, batches, 3, evaluate=batches[1:2]), tolerance=2e-5)


def test_a_last_batch_is_trained_on() -> None:
    check(GPT, even_plan(GPT, 2, microbatches=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_a_last_batch_of_a_library_s_model(name: str) -> None:
    check(nets.job(name), even_plan(nets.job(name), 3, microbatches=3))


@pytest.mark.slow
def test_a_constant_that_depends_on_the_size() -> None:
    counts = job(CountsRows)
    check(counts, even_plan(counts, 2, microbatches=3))


@pytest.mark.slow
def test_a_plan_for_one_row_trains_on_more() -> None:
    check(GPT, even_plan(GPT, 2, microbatches=3, microbatch_size=1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("treatment", ["recompute", "recompute ahead", "offload"])
def test_with_a_memory_policy(treatment: str) -> None:
    """What the policy says of residuals that one row lacks is left out."""
    ahead = (0, 1) if "ahead" in treatment else ()
    check(GPT, treated_plan(GPT, even_plan(GPT, 2, microbatches=3), treatment.split()[0], ahead=ahead))


def test_what_eager_pytorch_refuses_is_refused_with_its_reason() -> None:
    job = nets.job("counting")
    with pytest.raises(BatchError, match="Expected more than 1 value per channel when training"):
        pipelined(job, even_plan(job, 2, microbatches=2), [job.batch(0, 2)])
