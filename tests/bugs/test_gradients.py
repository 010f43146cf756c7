"""Gradients that were there in the pipeline and not in one process, or the other way round."""

from dataclasses import replace

import pytest
import torch
import zoo
from runs import assert_same, even, even_plan, pipelined, plain, plan_for

from pipeloom.tracer.capture import capture


@pytest.mark.slow
def test_a_tied_parameter_without_gradient_is_left_alone() -> None:
    """Summing it over ranks made its gradient zero instead of none: weight decay then shrank it."""
    job = replace(
        zoo.job("no_grad_branch"), optimizer=lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5)
    )
    batches = [job.batch(seed, 4) for seed in range(2)]
    found = pipelined(job, even_plan(job, 3, microbatches=2), batches)
    assert_same(found, plain(job, batches, 2), tolerance=1e-5)


@pytest.mark.slow
def test_a_stage_that_only_detaches_what_it_reads() -> None:
    """It has no backward, so the gradient that its source waited for never came."""
    job = zoo.job("no_grad_branch")
    captured = capture(job, 2)
    batches = [job.batch(1, 4)]
    for stages in (6, 12):
        plan = plan_for(captured, even(captured.graph, stages), microbatches=2, schedule="gpipe")
        assert_same(pipelined(job, plan, batches), plain(job, batches, 2), tolerance=1e-5)
