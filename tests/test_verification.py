"""verify passes for what is right, and fails for what is not; a model's first run here is compared first."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from odd.case import WIDTH, Between, Stack, job as job_of
from odd.decisions import LeavesOut, LeavesOutByPython
from odd.gradients import SparseEmbedding
from odd.state import SmallEmbeddings
from runs import capture_of, each_rank, even, even_plan, plan_for
from torch import Tensor, nn

from pipeloom import Job, Options, Pipeline, Plan, capture, verification, verify
from pipeloom.commands.verify import report
from pipeloom.ir.errors import BatchError, PlanError, VerifyError
from pipeloom.runtime.weights import Gradients, Weights
from pipeloom.tracer.stage import joint, trace
from pipeloom.verification import Verification

JOB = job_of(Stack)


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
    assert set(result.gradients) == set(result.parameters) == set(dict(Stack().named_parameters()))


class Averaging(Stack):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def run(self, h: Tensor) -> Tensor:
        return super().run(self.norm(h))


def gradient_off(
    self: Gradients, name: str, left: Tensor, grad: Tensor, *, real: Callable[..., None]
) -> None:
    real(self, name, left, grad * 1.001 if name == "head.weight" else grad)


def update_off(self: Weights, *, real: Callable[..., None]) -> None:
    real(self)
    with torch.no_grad():
        self.params.get("blocks.1.net.0.bias", torch.zeros(1)).mul_(1.01)


def buffer_off(self: Weights, name: str, tensor: Tensor, *, real: Callable[..., None]) -> None:
    real(self, name, tensor * 1.01 if name == "norm.running_mean" else tensor)


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "named"),
    [
        (Gradients, "add_product", gradient_off, r"gradient of head\.weight .* 0\.001"),
        (Weights, "step", update_off, r"updated blocks\.1\.net\.0\.bias .* 0\.01"),
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


def test_a_model_that_draws_is_compared_with_the_module_itself() -> None:
    result = verified(job_of(Dropping), 3)
    result.require()
    assert result.independent and result.reference.endswith("with the same random numbers")


def test_layers_that_are_left_out_are_compared() -> None:
    """LayerDrop draws single numbers (`torch.rand([])`): comparing them ended in a traceback."""
    made = job_of(LeavesOut)
    verify(made, even_plan(made, 2, microbatches=2)).require()


def test_the_verdict_says_where_a_model_is_compared_with_its_own_graph() -> None:
    """Python's random numbers: the pipeline seeds them by place."""
    result = verified(job_of(LeavesOutByPython))
    result.require()
    assert not result.independent and "Python" in result.reference
    assert report(result)[-1].endswith(", compared with its own graph")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 6e-2)]
)
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype, tolerance: float) -> None:
    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        tensors = JOB.batch(seed, rows)
        return {**tensors, "x": tensors["x"].to(dtype)}

    result = verified(Job(model=lambda: Stack().to(dtype), batch=batch))
    result.require()
    assert result.tolerance == tolerance


def test_mixed_precision_is_compared_with_the_module_itself() -> None:
    result = verified(JOB, options=Options(autocast=torch.bfloat16), autocast=torch.bfloat16)
    result.require()
    assert result.independent and result.worst < 0.02


def test_parameters_that_the_forward_changes_are_compared() -> None:
    """The update was made from what they were before the forward."""
    verified(job_of(SmallEmbeddings)).require()


class DrawsItsWeights(Stack):
    def prepare(self) -> None:
        with torch.no_grad():
            self.head.weight.mul_(random.random())


@pytest.mark.slow
def test_weights_that_python_draws_are_those_of_the_module() -> None:
    verified(job_of(DrawsItsWeights)).require()


def test_sparse_gradients_are_compared() -> None:
    verified(job_of(SparseEmbedding, zoo.token_batch)).require()


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="'0123456789abcdef'"):
        verify(JOB, replace(even_plan(JOB, 2, microbatches=3), graph="0123456789abcdef"))


class NotFinite(Stack):
    """Its loss is right, the gradient of one entry of its last bias is not a number."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = super().forward(x, y)["loss"]
        return {"loss": loss + 0.0 * torch.sqrt(self.head.bias[0] - self.head.bias[0]).sum()}


def test_numbers_that_are_none_pass_for_nothing() -> None:
    """`max` passed over NaN, so a gradient that is no number was called equal."""
    result = verified(job_of(NotFinite))
    assert result.loss <= result.tolerance
    assert result.gradients["head.bias"] == float("inf")
    with pytest.raises(VerifyError, match=r"gradient of head\.bias of .* is not finite in plain PyTorch too"):
        result.require()


class Logarithm(Stack):
    """Its loss is not a number, in plain PyTorch and in a pipeline."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (super().forward(x, y)["loss"] - 1e3).log()}


def test_a_loss_that_is_nan_in_plain_pytorch_is_no_difference() -> None:
    result = verified(job_of(Logarithm))
    assert not result.passed and result.verdict == "the loss of Logarithm is nan in plain PyTorch too"
    assert report(result)[-2] == result.verdict and "logarithms" in report(result)[-1]
    with pytest.raises(VerifyError, match="nan in plain PyTorch too\nhint: look at its logarithms"):
        result.require()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_only_the_pipeline_makes_not_finite_is_a_difference(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Pipeline.step
    monkeypatch.setattr(Pipeline, "step", lambda *args, **how: step(*args, **how) * wrong)
    result = verified(JOB)
    assert not result.passed and not result.not_finite
    assert result.verdict.startswith("loss differs by inf") and report(result)[-1].startswith("NOT equal")


class Masked(Stack):
    def prepare(self) -> None:
        self.register_buffer("mask", torch.full((WIDTH,), -float("inf")))

    def run(self, h: Tensor) -> Tensor:
        return super().run(h + self.mask.exp())


@pytest.mark.slow
def test_a_mask_of_infinities_is_equal() -> None:
    """A buffer that is not finite was infinitely different."""
    result = verified(job_of(Masked))
    result.require()
    assert result.buffers == {"mask": 0.0}


# Whether the loss is a mean over rows


class TokenMean(Stack):
    """The mean over those rows alone that count: micro-batches have more or fewer of them."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        counts = (x[..., 0] > 0).to(x.dtype)
        each = self.run(x).square().mean(-1)
        return {"loss": (each * counts).sum() / (counts.sum() + 1.0)}


class NormedTokenMean(TokenMean, Averaging):
    pass


class FrozenTokenMean(NormedTokenMean):
    """Its statistics are fixed."""

    def prepare(self) -> None:
        super().prepare()
        self.norm.eval()


class DroppedTokenMean(TokenMean, Dropping):
    pass


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records if record.name == "pipeloom"]
    return [text for text in told if "trains with other numbers" in text]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [TokenMean, FrozenTokenMean])
def test_a_loss_that_is_no_mean_over_rows_is_warned_of(
    model: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    result = verified(job_of(model))
    assert result.passed and result.off_mean is not None and result.off_mean > result.tolerance
    assert warnings_of(caplog) == [result.warning]
    assert model.__name__ in result.warning and f"{result.off_mean:.2g} relative" in result.warning


def test_a_mean_over_rows_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    result = verified(JOB)
    assert result.off_mean is not None and result.off_mean <= result.tolerance
    assert not result.warning and not warnings_of(caplog)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [NormedTokenMean, DroppedTokenMean])
def test_where_rows_cannot_be_told_apart_nothing_is_said(model: type[nn.Module]) -> None:
    result = verified(job_of(model))
    assert result.passed and result.off_mean is None and not result.warning


def test_nothing_is_said_where_a_weight_is_given() -> None:
    result = verified(replace(job_of(TokenMean), weight=lambda batch: (batch["x"][..., 0] > 0).sum() + 1.0))
    assert result.passed and result.off_mean is None and not result.warning


class FixedSize(Stack):
    """It takes no more rows than a micro-batch has."""

    def run(self, h: Tensor) -> Tensor:
        return super().run(h.reshape(2, *h.shape[1:]))


def test_a_model_that_takes_no_whole_batch_is_verified_without_it() -> None:
    result = verified(job_of(FixedSize))
    assert result.passed and result.off_mean is None


# Before a first run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pipeloom" / "compared"


def train(job: Job, plan: Plan, *, compare: bool = True) -> list[float]:
    return each_rank(job, plan, lambda pipeline: pipeline.step(job.batch(0, 8)), compare=compare)


@dataclass
class Comparisons:
    """rows: of each comparison that was begun.  least: a job makes no micro-batch of fewer rows."""

    rows: list[int] = field(default_factory=list)
    least: int = 1


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    noted, compare = Comparisons(), verification.compare_first

    def note(*call: Any) -> object:
        noted.rows.append(call[4])
        if call[4] < noted.least:
            raise BatchError(f"no batch of {call[4]} rows")
        return compare(*call)

    monkeypatch.setattr(verification, "compare_first", note)
    return noted


COUNTED = {"calls": 0}


class CountsElsewhere(Stack):
    """What no rule foresees: it is no attribute of a module."""

    def run(self, h: Tensor) -> Tensor:
        COUNTED["calls"] += 1
        return super().run(h) * COUNTED["calls"]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_that_tracing_freezes_is_refused_before_its_first_step(stages: int) -> None:
    job = job_of(CountsElsewhere)
    plan = even_plan(job, stages, microbatches=4)
    with pytest.raises(VerifyError, match="CountsElsewhere"):
        train(job, plan)
    assert len(train(job, plan, compare=False)) == stages


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_model_that_is_equal_is_remembered(cache: Path, schedule: str, compared: Comparisons) -> None:
    plan = even_plan(JOB, 2, microbatches=4, schedule=schedule)
    first = train(JOB, plan)
    assert len(list(cache.iterdir())) == len(compared.rows) == 1
    assert first == train(JOB, plan) == train(JOB, plan, compare=False)
    assert len(compared.rows) == 1
    train(JOB, even_plan(JOB, 3, microbatches=4))  # as many stages as never before
    assert len(compared.rows) == 2


def test_another_reduction_of_the_same_loss_is_compared(compared: Comparisons) -> None:
    for reduction in ("mean", "sum"):
        loss = nn.L1Loss(reduction=reduction)
        job = replace(JOB, loss=lambda output, batch, loss=loss: loss(output["loss"], batch["x"].mean()))
        train(job, even_plan(job, 2, microbatches=4))
    assert len(compared.rows) == 2


def test_a_loss_that_is_no_mean_is_warned_of_before_every_run(
    cache: Path, compared: Comparisons, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(TokenMean)
    plan = even_plan(job, 2, microbatches=4)
    for run in (1, 2):
        train(job, plan)
        assert len(warnings_of(caplog)) == run
    assert len(list(cache.iterdir())) == len(compared.rows) == 1


def test_a_loss_that_is_nan_in_plain_pytorch_is_refused_with_that_reason() -> None:
    job = job_of(Logarithm)
    with pytest.raises(VerifyError, match="the loss of Logarithm is nan in plain PyTorch too"):
        train(job, even_plan(job, 2, microbatches=4))


class Random(Averaging, Dropping):
    pass


@pytest.mark.parametrize("model", [Random, Between])
def test_models_of_other_kinds_are_compared(cache: Path, model: type[nn.Module]) -> None:
    """And training is not changed by it."""
    job = job_of(model)
    plan = even_plan(job, 2, microbatches=4)
    without = train(job, plan, compare=False)
    assert train(job, plan) == without
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("least", "fitting", "quick", "rows", "said"),
    [
        (1, 0, True, [], "was not compared"),
        (1, 1, True, [1], "of 1 row; with 2"),
        (1, 2, True, [2], ""),
        (1, 2, False, [1], "more than 20 s"),
        (2, 2, False, [1, 2], ""),  # it takes long, but it is possible
        (2, 1, False, [1], "was not compared"),
        (3, 2, False, [1, 2], BatchError),  # nor has the job a batch for the plan
    ],
)
def test_as_many_rows_are_compared_as_fit_and_are_quick(
    cache: Path,
    compared: Comparisons,
    least: int,
    fitting: int,
    quick: bool,
    rows: list[int],
    said: str | type[BatchError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two rows per micro-batch. least: that the job makes.  fitting: as many bytes are allowed.
    quick: by the plan's times both rows are."""
    captured, plan = capture_of(JOB), even_plan(JOB, 2, microbatches=2)
    if not quick:
        each_s = verification.MOST_S / verification.MICROBATCHES / len(plan.stages)
        plan = replace(plan, stages=tuple(replace(stage, forward_s=each_s) for stage in plan.stages))
    compared.least = least
    plan = replace(plan, caps=(verification.needed_bytes(captured.graph, fitting / 2), 1 << 40))
    with pytest.raises(BatchError) if said is BatchError else contextlib.nullcontext():
        verification.verify_once(JOB, plan, captured, Options(compare=True))
    assert compared.rows == rows
    told = [record.getMessage() for record in caplog.records if record.name == "pipeloom"]
    warned = [text for text in told if "once for this model" not in text]  # which says how long it took
    assert warned == [] if said in ("", BatchError) else [said in text for text in warned] == [True]
    assert cache.exists() is (said not in ("was not compared", BatchError))


def test_one_row_is_enough_to_see_a_difference(compared: Comparisons) -> None:
    job = job_of(CountsElsewhere)
    captured, plan = capture_of(job), even_plan(job, 2, microbatches=2)
    plan = replace(plan, caps=(verification.needed_bytes(captured.graph, 1 / 2),) * 2)
    with pytest.raises(VerifyError):
        verification.verify_once(job, plan, captured, Options(compare=True))
    assert compared.rows == [1]


@pytest.mark.own_captures
def test_smaller_micro_batches_with_dropout_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    """They never were, in each run anew: the smaller size was captured while random numbers were being
    recorded, which torch.export refuses."""
    job = job_of(Dropping)
    plan = even_plan(job, 2, microbatches=4)
    captured = capture(job, plan.microbatch_size)
    found = verification.compare_first(job, plan, captured, Options(), rows=1)
    assert found.passed and found.independent and found.reference.endswith("with the same random numbers")
    assert not [record for record in caplog.records if record.name == "pipeloom"]


def test_where_python_draws_a_smaller_model_is_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(LeavesOutByPython)
    plan = even_plan(job, 2, microbatches=4)
    verification.verify_once(job, plan, capture(job, plan.microbatch_size), Options(compare=True))
    assert "own captured graph" in caplog.text and "smaller" not in caplog.text


@pytest.mark.own_captures
def test_what_the_comparison_has_traced_is_not_traced_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[tuple[str, ...]] = []
    trace_joint = joint.trace_joint

    def noted(stage: Any, *rest: Any) -> Any:
        traced.append(stage.outputs)
        return trace_joint(stage, *rest)

    monkeypatch.setattr(trace, "trace_joint", noted)
    with Pipeline(JOB, even_plan(JOB, 1, microbatches=4), options=Options(compare=True)) as pipeline:
        assert len(list(cache.iterdir())) == len(traced) == 1
        assert not pipeline.captured.traced
        pipeline.step(JOB.batch(0, 8))


def test_it_uses_all_cores_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait meanwhile, and each goes on with one thread afterwards."""
    before, inside = torch.get_num_threads(), list[int]()

    def verify(*args: object, **options: object) -> None:
        inside.append(torch.get_num_threads())
        raise VerifyError("differs")

    monkeypatch.setattr(verification, "usable_cores", lambda: before + 2)
    monkeypatch.setattr(verification, "verify", verify)
    with pytest.raises(VerifyError):
        verification.compare_first(JOB, even_plan(JOB, 2, microbatches=2), capture_of(JOB), Options())
    assert inside == [before + 2] and torch.get_num_threads() == before


def test_replicas_are_compared_as_one() -> None:
    captured = capture_of(JOB)
    plan = plan_for(captured, even(captured.graph, 2), microbatches=4, placement=(0, 1))
    twice = replace(plan, placement=(0, 1, 1, 0))
    assert verification.compare_first(JOB, twice, captured, Options()).passed


def test_it_is_off_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("PIPELOOM_COMPARE", value)
        assert Options().compare is expected
    monkeypatch.delenv("PIPELOOM_COMPARE")
    assert Options().compare
