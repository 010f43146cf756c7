"""evaluate() is model.eval(), whatever the user's code does with `self.training`."""

from collections.abc import Callable

import pytest
import torch
import zoo
from runs import assert_same, even, even_plan, pipelined, plain, plan_for
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job
from pipeloom.ir.errors import CutError
from pipeloom.tracer.capture import capture
from pipeloom.tracer.export.evaluation import capture_evaluation, cut_evaluation


class Modes(nn.Module):
    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return fn.mse_loss(self.b(self.between(self, self.a(x))), y)


def dropped_path(self: nn.Module, h: Tensor) -> Tensor:
    return h * torch.bernoulli(torch.full((len(h), 1), 0.5)) * 2 if self.training else h


def images(self: nn.Module, h: Tensor) -> Tensor:
    return fn.dropout2d(h.view(-1, 2, 2, 2), 0.5, self.training).flatten(1)


def recurrent(self: nn.Module, h: Tensor) -> Tensor:
    return self.part(h.view(-1, 2, 4))[0].flatten(1)


CASES: dict[str, Callable[[], nn.Module]] = {
    "if training": lambda: Modes(lambda self, h: h * 2 if self.training else h),
    "stochastic depth": lambda: Modes(dropped_path),
    "dropout of channels": lambda: Modes(images),
    "alpha dropout": lambda: Modes(lambda self, h: fn.alpha_dropout(h, 0.5, self.training)),
    "recurrent dropout": lambda: Modes(recurrent, part=nn.LSTM(4, 4, 3, dropout=0.5, batch_first=True)),
    "spectral norm": lambda: Modes(
        lambda self, h: self.part(h), part=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
    "frozen statistics": lambda: Modes(lambda self, h: self.part(h), part=nn.BatchNorm1d(8).eval()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c == "recurrent dropout" else c for c in CASES]
)
def test_evaluation_is_that_of_the_module(case: str) -> None:
    """Evaluation was the training graph with the flags of known calls turned off."""
    job = Job(model=CASES[case], batch=zoo.vector_batch, optimizer=zoo.sgd)
    batches = [job.batch(3, 4)]
    expected = plain(job, [], 2, evaluate=batches)
    for stages in (1, 2):
        found = pipelined(job, even_plan(job, stages, microbatches=2), [], evaluate=batches)
        assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-6)


def test_evaluation_updates_nothing_and_leaves_the_training_mode() -> None:
    job = zoo.job("counting")
    captured = capture(job, 2)
    evaluated = capture_evaluation(job, captured, job.batch(0, 2))
    assert captured.blueprint.model.training and captured.blueprint.model.norm.training
    assert not any(op.updates for op in evaluated.graph.ops)
    assert not any(value.needs_grad for value in evaluated.graph.value.values())


def test_a_stage_that_only_trains() -> None:
    """There is no evaluation cut for a plan with a stage of dropout alone; it says which stage."""
    job = Job(model=CASES["alpha dropout"], batch=zoo.vector_batch)
    captured = capture(job, 2)
    evaluated = capture_evaluation(job, captured, job.batch(0, 2))
    plan = plan_for(captured, even(captured.graph, 3), microbatches=1, schedule="gpipe")
    stages = plan.stage_graph(captured.graph)
    with pytest.raises(CutError, match="stage 1 has nothing to do in evaluation mode"):
        cut_evaluation(evaluated.graph, captured.graph, stages)


class PutsAWeightInPlace(nn.Module):
    """What tracing the training mode left behind was taken for the model's own in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.direction = nn.Parameter(torch.randn(8, 8))
        del self.head.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.head.weight = self.direction / self.direction.norm()
        return (self.head(self.body(x)) - y).square().mean()


def test_tensors_that_the_forward_leaves_in_new_attributes() -> None:
    job = Job(model=PutsAWeightInPlace, batch=zoo.vector_batch, optimizer=zoo.sgd)
    batches = [job.batch(3, 4)]
    found = pipelined(job, even_plan(job, 2, microbatches=2), batches, evaluate=batches)
    assert_same(found, plain(job, batches, 2, evaluate=batches), tolerance=1e-5)


class RegistersABuffer(nn.Module):
    """A cache, as of ALiBi in x_transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.bias is None:
            self.register_buffer("bias", torch.arange(8.0), persistent=False)
        return (self.head(self.body(x) + self.bias) - y).square().mean()


def test_buffers_that_the_forward_registers() -> None:
    """They were looked for among what the constructor made: a KeyError."""
    job = Job(model=RegistersABuffer, batch=zoo.vector_batch, optimizer=zoo.sgd)
    batches = [job.batch(3, 4)]
    found, expected = (
        pipelined(job, even_plan(job, 2, microbatches=2), batches, evaluate=batches),
        plain(job, batches, 2, evaluate=batches),
    )
    expected.buffers.clear()
    assert_same(found, expected, tolerance=1e-5)
