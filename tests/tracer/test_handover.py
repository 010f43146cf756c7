"""A rank that is handed a captured model computes the same, and exports nothing."""

from __future__ import annotations

from dataclasses import replace

import nets
import pytest
import torch
from odd.control_flow import JOBS as ODD
from runs import even_plan, threads
from torch import nn

from pipeloom import Job, Options, Pipeline
from pipeloom.ir.errors import CaptureError
from pipeloom.runtime.channel import Channel
from pipeloom.tracer.capture import capture
from pipeloom.tracer.captured import Captured
from pipeloom.tracer.evaluation import capture_evaluation
from pipeloom.tracer.handover import hand_over, take_over, take_over_evaluation
from pipeloom.tracer.stage import trace
from pipeloom.tracer.stage.trace import stage_functions
from pipeloom.train.config import Config
from pipeloom.train.rank_processes import RankProcesses, take_over as take_over_model, trace_ahead


class Attributes(nn.Module):
    """Tensors that the constructor makes beside parameters and buffers; a branch on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.slope = torch.linspace(0, 1, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            h = (nn.functional.dropout(h, 0.3) + torch.tensor([0.5])) * self.slope
        return ((self.b(h - self.mean).transpose(0, 1).contiguous().T - y) ** 2).mean()


JOBS = {
    "gpt2": nets.job("gpt2"),
    "convnet": nets.job("convnet"),
    "attributes": Job(model=Attributes, batch=nets.vector_batch, optimizer=nets.sgd),
}


def handed(job: Job) -> tuple[bytes, bytes]:
    captured = capture(job, 2)
    training = hand_over(captured)
    evaluation = hand_over(capture_evaluation(job, captured, job.batch(0, 2)))
    assert training is not None and evaluation is not None
    return training, evaluation


def taken(data: tuple[bytes, bytes], job: Job) -> Captured:
    captured = take_over(data[0], job)
    take_over_evaluation(data[1], captured, job)
    return captured


def refuse_to_export(*_: object, **__: object) -> None:
    raise AssertionError("a rank exported")


@pytest.mark.sampled("attributes")
@pytest.mark.parametrize("name", JOBS)
def test_ranks_train_and_evaluate_without_exporting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name]
    plan = even_plan(job, 2, microbatches=2)
    data = handed(job)

    def numbers(index: int, channel: Channel, *, takes_over: bool) -> list[float]:
        captured = taken(data, job) if takes_over else None
        with Pipeline(job, plan, options=Options(seed=3), channel=channel, captured=captured) as pipeline:
            losses = [pipeline.step(job.batch(seed, 4)) for seed in range(2)]
            return [*losses, pipeline.evaluate(job.batch(5, 4))]

    expected = threads(2, lambda *rank: numbers(*rank, takes_over=False))
    monkeypatch.setattr(torch.export, "export", refuse_to_export)
    for of_ranks in ("pipeline.capture", "rank_stages.capture_evaluation"):  # an earlier result is no excuse
        monkeypatch.setattr(f"pipeloom.{of_ranks}", refuse_to_export)
    assert threads(2, lambda *rank: numbers(*rank, takes_over=True)) == expected


@pytest.mark.own_captures
def test_what_a_rank_takes_over_early_is_neither_taken_over_nor_traced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = JOBS["attributes"]
    plan = even_plan(job, 2, microbatches=2)
    given = RankProcesses().hand_over(Config(), job, plan, evaluates=True)
    assert given is not None and given.evaluation is not None
    expected = take_over_model(given, job)
    assert expected is not None and expected.evaluation is not None and not expected.traced

    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("pipeloom.train.workload.job_of", lambda config: job)
        trace_ahead(Config(), plan, replace(given, evaluation=None))
        with monkeypatch.context() as taken:
            taken.setattr("pipeloom.tracer.handover.take_over", refuse_to_export)
            found = take_over_model(given, job)
        assert found is not None and found.evaluation is not None
        assert (found.graph, found.evaluation.graph) == (expected.graph, expected.evaluation.graph)
        assert len(found.traced) == 1
        with monkeypatch.context() as traced:
            traced.setattr(trace, "trace_joint", refuse_to_export)
            stage_functions(found, plan.stage_graph(found.graph), rank)
    again = take_over_model(given, job)
    assert again is not None and not again.traced  # it is given once


def test_models_that_each_rank_captures() -> None:
    """Those that are cut between their modules."""
    assert hand_over(capture(ODD["branch in blocks"], 2)) is None


def test_another_model_in_the_rank_is_refused() -> None:
    data = hand_over(capture(JOBS["convnet"], 2))
    assert data is not None
    with pytest.raises(CaptureError, match="when captured, and in this process it is"):
        take_over(data, replace(JOBS["convnet"], model=Attributes))
