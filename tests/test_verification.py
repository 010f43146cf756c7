"""verify passes for what is right, and fails for what is not; a model's first run here is compared first."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import nets
import pytest
import torch
from batches import normal
from odd.case import WIDTH, Between, Deciding, Stack, job as job_of
from odd.control_flow import LeavesOut, LeavesOutByPython
from odd.gradients import SparseEmbedding
from odd.state import CountsInside, SmallEmbeddings
from refusals import refused
from runs import capture_of, each_rank, even, even_plan, plan_for
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom import Job, Options, Pipeline, Plan, capture, verification, verify
from pipeloom.commands.verify import report
from pipeloom.ir.errors import BatchError, VerifyError
from pipeloom.runtime.weights import Gradients, Weights
from pipeloom.verification import Verification

JOB = job_of(Stack)


def verified(job: Job, stages: int = 2, options: Options | None = None, **how: Any) -> Verification:
    return verify(job, even_plan(job, stages, microbatches=3, **how), options=options)


def compare_once(job: Job) -> None:
    plan = even_plan(job, 2, microbatches=4)
    verification.verify_once(job, plan, capture_of(job), Options(compare=True))


@pytest.mark.parametrize(
    ("job", "how", "options", "tolerance"),
    [
        # Clipped, too: gradients are compared before that, and updates after it.
        (JOB, {"schedule": "1f1b", "split": True}, Options(clip_norm=1e-2), 1e-5),
        (nets.in_double(JOB), {"schedule": "gpipe"}, None, 1e-10),
        (JOB, {"autocast": torch.bfloat16}, Options(autocast=torch.bfloat16), 6e-2),
    ],
)
def test_a_right_pipeline_passes_within_the_tolerance_of_its_dtype(job, how, options, tolerance):
    result = verified(job, options=options, **how)
    result.require()
    assert result.passed and result.reference.startswith("the module itself, eager")
    assert set(result.gradients) == set(result.parameters) == set(dict(Stack().named_parameters()))
    assert result.worst <= result.tolerance == tolerance


class Averaging(Stack):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def run(self, h: Tensor) -> Tensor:
        return super().run(self.norm(h))


def gradient_off(real, gradients, name, left, grad):
    real(gradients, name, left, grad * 1.001 if name == "head.weight" else grad)


def update_off(real, weights):
    real(weights)
    weights.params.get("blocks.1.net.0.bias", torch.zeros(1)).data.mul_(1.01)


def buffer_off(real, weights, name, tensor):
    real(weights, name, tensor * 1.01 if name == "norm.running_mean" else tensor)


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "named"),
    [
        (Gradients, "add_product", gradient_off, r"gradient of head\.weight .* 0\.001"),
        (Weights, "step", update_off, r"updated blocks\.1\.net\.0\.bias .* 0\.01"),
        (Weights, "replace_buffer", buffer_off, r"buffer norm\.running_mean .* 0\.01"),
    ],
    ids=["gradient", "update", "buffer"],
)
def test_what_is_wrong_fails_and_is_named(owner, method, wrong, named, monkeypatch):
    job, real = job_of(Averaging), getattr(owner, method)
    right = verified(job)
    assert right.passed and {"norm.running_mean", "norm.running_var"} <= set(right.buffers)
    monkeypatch.setattr(owner, method, lambda *args: wrong(real, *args))
    assert re.search(named, refused(VerifyError, verified(job).require))


class Centred(Stack):
    def run(self, h: Tensor) -> Tensor:
        h = self.inlet(h)
        return super().run(torch.tanh(h - h.mean(0)))


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference_under_adam() -> None:
    """A bias cancels in a normalisation; Adam makes full steps of what rounding leaves of its gradient."""
    job = replace(job_of(Centred), optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))
    verified(job, 3).require()


class Dropping(Stack):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h + nn.functional.dropout(torch.tanh(h), 0.5))


class Masked(Stack):
    """A buffer that is not finite."""

    def prepare(self) -> None:
        self.register_buffer("mask", torch.full((WIDTH,), -float("inf")))

    def run(self, h: Tensor) -> Tensor:
        return super().run(h + self.mask.exp())


@pytest.mark.parametrize(
    "job",
    [
        job_of(Dropping),
        job_of(LeavesOut),  # draws single numbers
        job_of(SmallEmbeddings),  # its forward changes parameters
        job_of(SparseEmbedding, nets.token_batch),
        pytest.param(job_of(Masked), marks=pytest.mark.slow),
    ],
    ids=lambda job: job.name,
)
def test_odd_models_are_compared_with_the_module_itself(job: Job) -> None:
    result = verified(job)
    result.require()
    draws = job.name in ("Dropping", "LeavesOut")
    assert result.independent and ("random numbers" in result.reference) is draws


def test_where_python_draws_a_model_is_compared_with_its_own_graph(caplog: pytest.LogCaptureFixture) -> None:
    """And a smaller model is no advice."""
    job = job_of(LeavesOutByPython)
    result = verified(job)
    result.require()
    assert not result.independent and report(result)[-1].endswith(", compared with its own graph")
    compare_once(job)
    assert "own captured graph" in caplog.text and "smaller" not in caplog.text


class NotFinite(Stack):
    """Its loss is right, the gradient of one entry of its last bias is not a number."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = super().forward(x, y)["loss"]
        return {"loss": loss + 0.0 * torch.sqrt(self.head.bias[0] - self.head.bias[0]).sum()}


class Logarithm(Stack):
    """Its loss is not a number, in plain PyTorch and in a pipeline."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (super().forward(x, y)["loss"] - 1e3).log()}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (NotFinite, r"gradient of head\.bias of .* is not finite in plain PyTorch too"),
        (Logarithm, "loss of Logarithm is nan in plain PyTorch too"),
    ],
)
def test_numbers_that_are_none_in_plain_pytorch_too_pass_for_nothing(model, named):
    result = verified(job_of(model))
    assert not result.passed and result.not_finite and report(result)[-2] == result.verdict
    assert re.search(named, refused(VerifyError, result.require))


def test_what_only_the_pipeline_makes_not_finite_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Pipeline.step
    monkeypatch.setattr(Pipeline, "step", lambda *args, **how: step(*args, **how) * float("nan"))
    result = verified(JOB)
    assert not result.passed and not result.not_finite
    assert result.verdict.startswith("loss differs by inf") and report(result)[-2].startswith("NOT equal")


# Whether the loss is a mean over rows


class TokenMean(Stack):
    """The mean over those rows alone that count: micro-batches have more or fewer of them."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        counts = (x[..., 0] > 0).to(x.dtype)
        each = self.run(x).square().mean(-1)
        return {"loss": (each * counts).sum() / (counts.sum() + 1.0)}


class NormedTokenMean(TokenMean, Averaging):
    pass


class Doubling(Stack):
    """It changes its input in place."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x.mul_(2), y)


class FixedSize(Stack):
    """It takes no more rows than a micro-batch has."""

    def run(self, h: Tensor) -> Tensor:
        return super().run(h.reshape(2, *h.shape[1:]))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records if record.name == "pipeloom"]
    return [text for text in told if "trains with other numbers" in text]


@pytest.mark.parametrize(
    ("job", "off"),
    [
        (JOB, False),
        (job_of(Doubling), False),
        (job_of(TokenMean), True),
        # Rows cannot be told apart, a weight is given, or there is no whole batch.
        (job_of(NormedTokenMean), None),
        (replace(job_of(TokenMean), weight=lambda batch: (batch["x"][..., 0] > 0).sum() + 1.0), None),
        (job_of(FixedSize), None),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_is_warned_of(job, off, caplog):
    result = verified(job)
    assert result.passed
    assert off is None if result.off_mean is None else (result.off_mean > result.tolerance) is off
    assert bool(result.warning) is bool(off) and warnings_of(caplog) == [result.warning] * bool(off)
    assert job.name in result.warning or not off


# Before a first run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pipeloom" / "compared"


def train(job: Job, plan: Plan, *, compare: bool = True) -> list[float]:
    return each_rank(job, plan, lambda pipeline: pipeline.step(job.batch(0, 8)), compare=compare)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Mock:
    mock = Mock(wraps=verification.compare_first)
    monkeypatch.setattr(verification, "compare_first", mock)
    return mock


COUNTED = {"calls": 0}


class CountsElsewhere(Stack):
    """What no rule foresees: it is no attribute of a module."""

    def run(self, h: Tensor) -> Tensor:
        COUNTED["calls"] += 1
        return super().run(h) * COUNTED["calls"]


def test_a_model_that_tracing_freezes_is_refused_before_its_first_step() -> None:
    job = job_of(CountsElsewhere)
    plan = even_plan(job, 2, microbatches=4)
    assert "CountsElsewhere" in refused(VerifyError, train, job, plan)
    assert len(train(job, plan, compare=False)) == 2


def test_an_equal_model_is_remembered_and_a_loss_that_is_no_mean_warned_of_each_time(cache, compared, caplog):
    job = job_of(TokenMean)
    plan = even_plan(job, 2, microbatches=4)
    without = train(job, plan, compare=False)
    for run in (1, 2):
        assert train(job, plan) == without
        assert len(warnings_of(caplog)) == run
    assert len(list(cache.iterdir())) == compared.call_count == 1
    train(job, even_plan(job, 3, microbatches=4))  # as many stages as never before
    assert compared.call_count == 2


def small_job(*layers: nn.Module, loss: Callable[..., Tensor]) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)),
        batch=normal(input=(WIDTH,)),
        loss=loss,
    )


def test_another_reduction_of_the_same_loss_is_compared(compared: Mock) -> None:
    for reduction in ("mean", "sum"):
        loss = nn.L1Loss(reduction=reduction)
        compare_once(small_job(loss=lambda output, batch, loss=loss: loss(output, batch["input"])))
    assert compared.call_count == 2


class BoundLate(Stack):
    """Its backward computes every block anew by the last one, which no graph has."""

    def run(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(lambda x: block(x), h, use_reentrant=False)  # noqa: B023
        return h


def test_another_class_with_the_same_graph_is_compared() -> None:
    for kind, equal in ((Stack, nullcontext()), (BoundLate, pytest.raises(VerifyError, match="gradient"))):
        with equal:
            compare_once(job_of(kind))


class Random(Averaging, Dropping):
    pass


@pytest.mark.parametrize("model", [Random, pytest.param(Between, marks=pytest.mark.slow)])
def test_models_of_other_kinds_are_compared(cache: Path, model: type[nn.Module]) -> None:
    """And training is not changed by it."""
    job = job_of(model)
    plan = even_plan(job, 2, microbatches=4)
    assert train(job, plan) == train(job, plan, compare=False)
    assert len(list(cache.iterdir())) == 1


EQUAL = Verification(
    loss=0.0, gradients={}, parameters={}, buffers={}, tolerance=1e-5, reference=verification.EAGER
)


@pytest.mark.parametrize(
    ("least", "fitting", "quick", "rows", "said"),
    [
        (1, 0, True, [], "was not compared"),
        (1, 1, True, [1], "of 1 row; with 2"),
        (1, 2, True, [2], ""),
        (1, 2, False, [1], "more than 20 s"),
        (2, 2, False, [1, 2], ""),  # it takes long, but it is possible
        (2, 1, False, [1], "was not compared"),
    ],
)
def test_as_many_rows_are_compared_as_fit(least, fitting, quick, rows, said, cache, caplog, monkeypatch):
    """Of two rows per micro-batch. least: that the job makes.  fitting: as many bytes are allowed.
    quick: by the plan's times both rows are."""
    tried: list[int] = []

    def compare(*call: Any) -> Verification:
        tried.append(call[4])
        if call[4] < least:
            raise BatchError(f"no batch of {call[4]} rows")
        return EQUAL

    monkeypatch.setattr(verification, "compare_first", compare)
    captured, plan = capture_of(JOB), even_plan(JOB, 2, microbatches=2)
    if not quick:
        each_s = verification.MOST_S / verification.MICROBATCHES / len(plan.stages)
        plan = replace(plan, stages=tuple(replace(stage, forward_s=each_s) for stage in plan.stages))
    plan = replace(plan, caps=(verification.needed_bytes(captured.graph, fitting / 2), 1 << 40))
    verification.verify_once(JOB, plan, captured, Options(compare=True))
    assert tried == rows
    assert said in caplog.text and bool(said) == bool(caplog.text)
    assert cache.exists() is (said != "was not compared")


@pytest.mark.own_captures
def test_smaller_micro_batches_with_dropout_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    """The smaller size was captured while random numbers were being recorded, which torch.export refuses."""
    job = small_job(nn.Dropout(0.5), loss=lambda output, batch: output.square().mean())
    plan = even_plan(job, 2, microbatches=4)
    found = verification.compare_first(job, plan, capture(job, 2), Options(), rows=1)
    assert found.passed and found.independent and found.reference.endswith("with the same random numbers")
    assert not [record for record in caplog.records if record.name == "pipeloom"]


def test_replicas_are_compared_as_one() -> None:
    captured = capture_of(JOB)
    plan = plan_for(captured, even(captured.graph, 2), microbatches=4, placement=(0, 1))
    twice = replace(plan, placement=(0, 1, 1, 0))
    assert verification.compare_first(JOB, twice, captured, Options()).passed


class SharesAScale(Between):
    """A block leaves a number in an object that another one reads."""

    class block(Deciding):
        number: int
        shared: SimpleNamespace

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if not self.number:
                self.shared.scale = 3.0
            return x if self.number == 1 else x * self.shared.scale

    def prepare(self) -> None:
        shared = SimpleNamespace(scale=1.0)
        for number, block in enumerate(self.blocks):
            block.shared, block.number = shared, number


@pytest.mark.parametrize(
    ("model", "placement", "same"),
    [
        (SharesAScale, (0, 0, 1, 2, 2), False),
        (SharesAScale, (0, 0, 1, 0, 0), True),
        (CountsInside, (0, 0, 1, 2, 2), True),
    ],
)
def test_stages_see_only_what_those_of_their_rank_leave_in_attributes(model, placement, same):
    job = job_of(model)
    found = verification.compare_first(
        job, even_plan(job, 5, microbatches=2, placement=placement), capture_of(job), Options()
    )
    assert found.passed is same


def test_it_is_off_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("PIPELOOM_COMPARE", value)
        assert Options().compare is expected
    monkeypatch.delenv("PIPELOOM_COMPARE")
    assert Options().compare
