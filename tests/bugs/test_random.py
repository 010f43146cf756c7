"""Random numbers: the same for any cut, and none of the user's."""

import pytest
import torch
import zoo
from runs import assert_same, even, pipelined, plan_for
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job, Options, Pipeline
from pipeloom.tracer.capture import capture
from pipeloom.tracer.random import call_seeded, end_random, seed_random


class Noisy(nn.Module):
    """Draws where no gradient flows: noise on the input, and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x + torch.randn_like(x))
        h = fn.dropout2d(h.view(-1, 2, 2, 2), 0.5).flatten(1)
        return fn.mse_loss(self.b(h * (torch.rand_like(h) > 0.2)), y)


def test_draws_in_a_stage_without_gradients() -> None:
    """Such a stage drew from the generator as it was."""
    job = Job(model=Noisy, batch=zoo.vector_batch, optimizer=zoo.sgd)
    captured = capture(job, 2)
    batches = [job.batch(seed, 4) for seed in range(2)]
    count = sum(not op.cheap for op in captured.graph.ops)

    def run(stages: int) -> object:
        plan = plan_for(captured, even(captured.graph, stages), microbatches=2, schedule="gpipe")
        return pipelined(job, plan, batches)

    uncut = run(1)
    for stages in (2, count):
        assert_same(run(stages), uncut, tolerance=1e-6)


@pytest.mark.slow
def test_a_step_leaves_the_users_generator_alone() -> None:
    """Ranks that drew their batches alike got different ones after the first dropout."""
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
    """Other ranks of the process waited for ever."""
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
