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

GPT = Job(model=partial(nets.GPT, 8, 1), batch=nets.token_batch, optimizer=nets.sgd, name="gpt")


@pytest.mark.sampled("gpt", "recompute")
@pytest.mark.parametrize(
    ("job", "stages", "microbatch_size", "treatments"),
    [
        pytest.param(GPT, 2, 2, "", id="gpt"),
        *(pytest.param(nets.job(name), 3, 2, "", id=name) for name in ("gpt2", "t5", "mixtral")),
        pytest.param(job(CountsRows), 2, 2, "", id="a constant that depends on the size"),
        pytest.param(GPT, 2, 1, "", id="planned for one row"),
        *(pytest.param(GPT, 2, 2, how, id=how) for how in ("recompute", "recompute ahead", "offload")),
    ],
)
def test_a_last_batch_is_trained_on(job: Job, stages: int, microbatch_size: int, treatments: str) -> None:
    """It leaves micro-batches of 2, 1 and 1 rows. What a policy says of residuals that one row lacks is left
    out."""
    plan = even_plan(job, stages, microbatches=3, microbatch_size=microbatch_size)
    if treatments:
        ahead = (0, 1) if "ahead" in treatments else ()
        plan = treated_plan(job, plan, treatments.split()[0], ahead=ahead)
    batches = [job.batch(0, 6), job.batch(1, 4), job.batch(2, 6)]
    found = pipelined(job, plan, batches, evaluate=batches[1:2])
    assert_same(found, plain(job, batches, 3, evaluate=batches[1:2]), tolerance=2e-5)


def test_what_eager_pytorch_refuses_is_refused_with_its_reason() -> None:
    job = nets.job("counting")
    with pytest.raises(BatchError, match="Expected more than 1 value per channel when training"):
        pipelined(job, even_plan(job, 2, microbatches=2), [job.batch(0, 2)])
