"""verify: passes for what is right, and fails for what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_net import PlainNet, job_of
from runs import even_plan
from torch import Tensor, nn

from pipeloom import Job, Options, verify
from pipeloom.commands.verify import report
from pipeloom.ir.errors import PlanError, VerifyError
from pipeloom.runtime.weights import Gradients, Weights
from pipeloom.verification import Verification

JOB = job_of(PlainNet)


def verified(job: Job, stages: int = 2, options: Options | None = None, **how: Any) -> Verification:
    return verify(job, even_plan(job, stages, microbatches=3, **how), options=options)


@pytest.mark.parametrize(
    ("schedule", "split", "clip_norm"), [("gpipe", False, None), ("1f1b", True, 1e-2), ("1f1b", False, 1e3)]
)
def test_a_right_pipeline_passes(schedule: str, split: bool, clip_norm: float | None) -> None:
    """Clipped, too: gradients are compared before that, and updates after it."""
    result = verified(JOB, options=Options(clip_norm=clip_norm), schedule=schedule, split=split)
    result.require()
    assert result.passed and result.reference == "the module itself, eager"
    assert set(result.gradients) == set(result.parameters) == set(dict(PlainNet().named_parameters()))


class Averaging(PlainNet):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(6)

    def run(self, h: Tensor) -> Tensor:
        return super().run(self.norm(h))


def gradient_off(
    self: Gradients, name: str, left: Tensor, grad: Tensor, *, real: Callable[..., None]
) -> None:
    real(self, name, left, grad * 1.001 if name == "head.weight" else grad)


def update_off(self: Weights, *, real: Callable[..., None]) -> None:
    real(self)
    with torch.no_grad():
        self.params.get("b.0.bias", torch.zeros(1)).mul_(1.01)


def buffer_off(self: Weights, name: str, tensor: Tensor, *, real: Callable[..., None]) -> None:
    real(self, name, tensor * 1.01 if name == "norm.running_mean" else tensor)


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "named"),
    [
        (Gradients, "add_product", gradient_off, r"gradient of head\.weight .* 0\.001"),
        (Weights, "step", update_off, r"updated b\.0\.bias .* 0\.01"),
        (Weights, "replace_buffer", buffer_off, r"buffer norm\.running_mean .* 0\.01"),
    ],
    ids=["gradient", "update", "buffer"],
)
def test_what_is_wrong_fails_and_is_named(
    owner: type, method: str, wrong: Callable[..., None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real = job_of(Averaging), getattr(owner, method)
    right = verified(job)
    assert right.passed and {"norm.running_mean", "norm.running_var"} <= set(right.buffers)
    monkeypatch.setattr(owner, method, lambda *args: wrong(*args, real=real))
    with pytest.raises(VerifyError, match=named):
        verified(job).require()


class Centred(PlainNet):
    def run(self, h: Tensor) -> Tensor:
        h = self.c(h)
        return super().run(torch.tanh(h - h.mean(0)))


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference_under_adam() -> None:
    """A bias cancels in a normalisation; Adam makes full steps of what rounding leaves of its gradient."""
    job = replace(job_of(Centred), optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))
    verified(job, 3).require()


class Dropping(PlainNet):
    def prepare(self) -> None:
        self.drop = nn.Dropout(0.5)

    def run(self, h: Tensor) -> Tensor:
        return super().run(h + self.drop(torch.tanh(h)))


class Sequences(PlainNet):
    """Dropout between the layers of an LSTM draws several times in one call."""

    def prepare(self) -> None:
        self.rnn = nn.LSTM(6, 6, num_layers=3, batch_first=True, dropout=0.3)
        self.attend = nn.TransformerEncoderLayer(6, 1, 8, dropout=0.3, batch_first=True)

    def run(self, h: Tensor) -> Tensor:
        h, _ = self.rnn(h[:, None].expand(-1, 4, -1))
        return super().run(self.attend(h).mean(1))


@pytest.mark.parametrize("model", [Dropping, pytest.param(Sequences, marks=pytest.mark.slow)])
def test_a_model_that_draws_is_compared_with_the_module_itself(model: type[nn.Module]) -> None:
    result = verified(job_of(model), 3)
    result.require()
    assert result.independent and result.reference.endswith("with the same random numbers")


class LeavesOutByPython(PlainNet):
    def run(self, h: Tensor) -> Tensor:
        for block in (self.a, self.b):
            if not self.training or random.random() > 0.4:
                h = block(h)
        return self.c(h)


def test_the_verdict_says_where_a_model_is_compared_with_its_own_graph() -> None:
    """Python's random numbers: the pipeline seeds them by place."""
    result = verified(job_of(LeavesOutByPython))
    result.require()
    assert not result.independent and "Python" in result.reference
    assert report(result)[-1].endswith(", compared with its own graph")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 6e-2)]
)
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype, tolerance: float) -> None:
    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        tensors = JOB.batch(seed, rows)
        return {**tensors, "x": tensors["x"].to(dtype)}

    result = verified(Job(model=lambda: PlainNet().to(dtype), batch=batch))
    result.require()
    assert result.tolerance == tolerance


def test_mixed_precision_is_compared_with_the_module_itself() -> None:
    result = verified(JOB, options=Options(autocast=torch.bfloat16), autocast=torch.bfloat16)
    result.require()
    assert result.independent and result.worst < 0.02


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="'0123456789abcdef'"):
        verify(JOB, replace(even_plan(JOB, 2, microbatches=3), graph="0123456789abcdef"))


class NotFinite(PlainNet):
    """Its loss is right, the gradient of one entry of its last bias is not a number."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = super().forward(x, y)["loss"]
        return {"loss": loss + 0.0 * torch.sqrt(self.head.bias[0] - self.head.bias[0]).sum()}


def test_numbers_that_are_none_pass_for_nothing() -> None:
    """`max` passed over NaN, so a gradient that is no number was called equal."""
    result = verified(job_of(NotFinite))
    assert result.loss <= result.tolerance
    assert result.gradients["head.bias"] == float("inf")
    with pytest.raises(VerifyError, match=r"head\.bias .* inf"):
        result.require()
