"""Schedules with several stages per rank, or with replicas, on other models: DAGs, dropout, module cuts."""

import pytest
import zoo
from every_schedule import plan_of
from odd.decisions import JOBS
from runs import assert_same, pipelined, plain, shared_captures

from pipeloom import Options, verify

SCHEDULES = ["interleaved_1f1b", "zb_v", "v_half", "hanayo", "chimera", "dualpipe"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "dualpipe" else pytest.param(n, marks=pytest.mark.slow) for n in SCHEDULES]
)
def test_dropout_draws_the_same_numbers(name: str) -> None:
    """Whichever replica runs a micro-batch, its masks are those of the uncut graph."""
    job = zoo.with_dropout("gpt")
    with shared_captures():
        result = verify(job, plan_of(job, name, 2, microbatches=4), options=Options(seed=3))
    result.require()
    assert result.reference.startswith("the module itself, eager")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "t5"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_other_families(model: str, name: str) -> None:
    """T5's stages are a DAG: every decoder stage reads the encoder's output."""
    job = zoo.job(model, double=True)
    batches = [job.batch(seed, 4) for seed in range(2)]
    found = pipelined(job, plan_of(job, name, 2, microbatches=4), batches, clip_norm=0.1)
    assert_same(found, plain(job, batches, 4, clip_norm=0.1), tolerance=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_accumulation_and_uneven_micro_batches(name: str) -> None:
    job = zoo.job("gpt", double=True)
    batches = [job.batch(seed, 21) for seed in range(2)]
    plan = plan_of(job, name, 2, microbatches=4, microbatch_size=2)
    found = pipelined(job, plan, batches, accumulate=2)
    assert_same(found, plain(job, batches, 8), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["skips", "branch between blocks"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_models_cut_between_modules(model: str, name: str) -> None:
    job = JOBS[model]
    batches = [job.batch(seed, 8) for seed in range(2)]
    plan = plan_of(job, name, 2, microbatches=4, microbatch_size=2)
    found = pipelined(job, plan, batches, evaluate=batches[:1])
    assert_same(found, plain(job, batches, 4, evaluate=batches[:1]), tolerance=2e-5)
