"""What an update of the weights takes, and the norm of its gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import runs
import torch
from torch import Tensor, nn

from pipeloom import Job, Options, Pipeline
from pipeloom.ir.errors import MemoryCapError
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.weights import Weights

RANKS, COUNT, WIDTH = 2, 8, 32


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"input": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))}


def loss(outputs: Any, batch: Any) -> Tensor:
    return outputs.square().mean()


JOB = Job(model=model, batch=batch, loss=loss)


def peaks(caps: tuple[int, ...]) -> list[int]:
    """The most bytes of each rank over two updates. Raises: MemoryCapError."""
    plan = runs.even_plan(JOB, RANKS, microbatches=COUNT, microbatch_size=1, schedule="1f1b")

    def rank(index: int, channel: Channel) -> int:
        capped = replace(plan, caps=caps)
        with Pipeline(JOB, capped, options=Options(compare=False), channel=channel) as pipeline:
            for step in range(2):
                pipeline.step(JOB.batch(step, COUNT))
            return pipeline.ledger.peak

    with runs.shared_captures():
        return runs.threads(RANKS, rank)


def test_messages_that_are_through_make_room_for_an_update() -> None:
    without = peaks(())
    less = tuple(peak - WIDTH for peak in without)
    assert all(peak <= cap for peak, cap in zip(peaks(less), less, strict=True))


def test_a_message_says_how_much_is_missing() -> None:
    with pytest.raises(MemoryCapError, match=r"its cap is .* less"):
        peaks((WIDTH * WIDTH,) * RANKS)


def test_an_optimizer_without_state_is_asked_for_it_once() -> None:
    made: list[object] = []

    def sgd(params: Any) -> torch.optim.Optimizer:
        made.append(params)
        return torch.optim.SGD(params, lr=0.1)

    job = replace(JOB, optimizer=sgd)
    plan = runs.even_plan(job, 1, microbatches=COUNT, microbatch_size=1, schedule="1f1b")
    with runs.shared_captures(), Pipeline(job, replace(plan, caps=(1 << 30,))) as pipeline:
        pipeline.step(job.batch(0, COUNT))
        before = len(made)
        for step in range(1, 4):
            pipeline.step(job.batch(step, COUNT))
    assert len(made) == before


@pytest.mark.parametrize("params", [{}, {"frozen": nn.Parameter(torch.zeros(3, device="meta"), False)}])
def test_nothing_is_zero_on_the_device_of_the_rank(params: dict[str, nn.Parameter]) -> None:
    weights = Weights(params, {}, None, device="meta")
    found = weights.norm_squares(params)
    assert found.device.type == "meta" and found.shape == () and found.dtype == torch.float64
