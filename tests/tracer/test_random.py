"""Random numbers of a pipeline are none of the user's."""

import pytest
import torch
import zoo
from runs import even, plan_for

from pipeloom import Options, Pipeline
from pipeloom.tracer.capture import capture
from pipeloom.tracer.random import call_seeded, end_random, seed_random


@pytest.mark.slow
def test_a_step_leaves_the_users_generator_alone() -> None:
    job = zoo.with_dropout("gpt")
    captured = capture(job, 2)
    plan = plan_for(captured, even(captured.graph, 1), microbatches=2)
    batch = job.batch(0, 4)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with Pipeline(job, plan, options=Options()) as pipeline:
        pipeline.step(batch)
        pipeline.evaluate(batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failing_draw_does_not_keep_the_turn() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        call_seeded(0, "call", torch.bernoulli, torch.tensor([2.0]))
    assert torch.equal(torch.get_rng_state(), before)
    seed_random(0, "outer")
    inner = call_seeded(0, "inner", torch.rand, 3)
    outer = torch.rand(3)
    end_random()
    assert torch.equal(inner, call_seeded(0, "inner", torch.rand, 3))
    assert torch.equal(outer, call_seeded(0, "outer", torch.rand, 3))
