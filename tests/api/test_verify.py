"""verify: passes for what is right, and fails for what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from odd.case import job
from odd.decisions import LeavesOutByPython
from torch import Tensor, nn

from pipeloom import Job, Options, Plan, verify
from pipeloom.commands.verify import report
from pipeloom.ir.errors import PlanError, VerifyError
from pipeloom.ir.plan import StagePlan
from pipeloom.ir.stages import cut
from pipeloom.passes import capture
from pipeloom.runtime.weights import Gradients, Weights
from pipeloom.schedules import registry


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.first(x))
        h = h + self.drop(torch.tanh(self.second(h)))
        return {"loss": nn.functional.cross_entropy(self.last(h), y)}


class Normed(Net):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        h = torch.tanh(h - h.mean(0))
        return {"loss": nn.functional.cross_entropy(self.last(self.second(h)), y)}


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, generator=g), "y": torch.randint(3, (rows,), generator=g)}


def plan_for(job: Job, stages: int, *, schedule: str = "1f1b", split: bool = False) -> Plan:
    graph = capture(job, 2).graph
    own = [op.name for op in graph.ops if not op.cheap]
    cuts = cut(graph, {name: i * stages // len(own) for i, name in enumerate(own)})
    placement = tuple(range(stages))
    built = registry.build(schedule, cuts, placement, 3, split_backward=split)
    return Plan(
        graph=graph.fingerprint,
        planner="by hand",
        stages=tuple(StagePlan(ops=s.ops) for s in cuts.stages),
        placement=placement,
        schedule=schedule,
        schedule_rows=tuple(str(built).splitlines()),
        microbatches=3,
        microbatch_size=2,
    )


JOB = Job(model=Net, batch=batch, name="net")


@pytest.mark.parametrize(("schedule", "split"), [("gpipe", False), ("1f1b", True)])
def test_a_right_pipeline_passes(schedule: str, split: bool) -> None:
    result = verify(JOB, plan_for(JOB, 2, schedule=schedule, split=split))
    result.require()
    assert result.passed and result.reference == "the module itself, eager"
    assert set(result.gradients) == set(result.parameters) == set(dict(Net().named_parameters()))


@pytest.mark.parametrize("clip_norm", [1e-2, 1e3])
def test_clipping_is_compared_too(clip_norm: float) -> None:
    """A right plan failed: the pipeline's gradients were compared after clipping."""
    result = verify(JOB, plan_for(JOB, 2), options=Options(clip_norm=clip_norm))
    result.require()
    assert result.passed


def test_a_wrong_gradient_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Gradients.add_product

    def wrong(self: Gradients, name: str, left: Tensor, grad: Tensor) -> None:
        right(self, name, left, grad * 1.001 if name == "last.weight" else grad)

    plan = plan_for(JOB, 2)
    pipelined = verify(JOB, plan)
    monkeypatch.setattr(Gradients, "add_product", wrong)
    with pytest.raises(VerifyError, match=r"gradient of last.weight differs by 0.001"):
        verify(JOB, plan).require()
    assert pipelined.passed


def test_a_wrong_update_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Weights.step

    def wrong(self: Weights) -> None:
        right(self)
        with torch.no_grad():
            self.params.get("second.bias", torch.zeros(1)).mul_(1.01)

    monkeypatch.setattr(Weights, "step", wrong)
    with pytest.raises(VerifyError, match=r"updated second.bias differs by 0.01"):
        verify(JOB, plan_for(JOB, 2)).require()


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference_under_adam() -> None:
    """The first bias cancels in a normalisation; Adam makes full steps of what rounding leaves of it."""
    job = replace(JOB, model=Normed, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))
    verify(job, plan_for(job, 3)).require()


def test_a_model_with_dropout_is_compared_with_the_module_itself() -> None:
    job = replace(JOB, model=lambda: Net(dropout=0.5))
    result = verify(job, plan_for(job, 3))
    result.require()
    assert result.reference == "the module itself, eager, with the same random numbers" and result.independent


class Sequences(nn.Module):
    """Dropout between the layers of an LSTM draws several times in one call; none draws not at all."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, num_layers=3, batch_first=True, dropout=dropout)
        self.attend = nn.TransformerEncoderLayer(5, 1, 8, dropout=dropout, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h, _ = self.rnn(x[:, None].expand(-1, 4, -1))
        return {"loss": nn.functional.cross_entropy(self.last(self.attend(h).mean(1)), y)}


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_recurrent_models_are_compared_with_the_module_itself(dropout: float) -> None:
    job = replace(JOB, model=lambda: Sequences(dropout))
    result = verify(job, plan_for(job, 2))
    result.require()
    assert result.reference == "the module itself, eager" + ", with the same random numbers" * (dropout > 0)


def test_the_verdict_says_where_a_model_is_compared_with_its_own_graph() -> None:
    """Python's random numbers: the pipeline seeds them by place."""
    draws = job(LeavesOutByPython)
    result = verify(draws, plan_for(draws, 2))
    result.require()
    assert (
        result.reference == "its own captured graph, uncut, since the forward draws Python's random numbers"
    )
    assert not result.independent and report(result)[-1].endswith(", compared with its own graph")


class Averaging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(self.norm(x), y)


def test_buffers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(JOB, model=Averaging)
    plan = plan_for(job, 2)
    right = verify(job, plan)
    assert right.passed and {"norm.running_mean", "norm.running_var"} <= set(right.buffers)
    replaced = Weights.replace_buffer

    def wrong(self: Weights, name: str, tensor: Tensor) -> None:
        replaced(self, name, tensor * 1.01 if name == "norm.running_mean" else tensor)

    monkeypatch.setattr(Weights, "replace_buffer", wrong)
    with pytest.raises(VerifyError, match=r"buffer norm.running_mean differs by 0.01"):
        verify(job, plan).require()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype) -> None:
    job = Job(
        model=lambda: Net().to(dtype),
        batch=lambda s, n: {"x": batch(s, n)["x"].to(dtype), "y": batch(s, n)["y"]},
    )
    result = verify(job, plan_for(job, 2))
    result.require()
    assert result.tolerance == {torch.float64: 1e-10, torch.bfloat16: 6e-2}[dtype]


def test_mixed_precision_is_compared_with_the_module_itself() -> None:
    job = replace(JOB)
    graph = capture(job, 2, autocast=torch.bfloat16).graph
    own = [op.name for op in graph.ops if not op.cheap]
    cuts = cut(graph, {name: i * 2 // len(own) for i, name in enumerate(own)})
    plan = replace(
        plan_for(job, 2), graph=graph.fingerprint, stages=tuple(StagePlan(ops=s.ops) for s in cuts.stages)
    )
    result = verify(job, plan, options=Options(autocast=torch.bfloat16))
    result.require()
    assert result.independent and result.worst < 0.02


@pytest.mark.slow
def test_dropout_really_drops() -> None:
    job = replace(JOB, model=lambda: Net(dropout=0.5))
    assert verify(job, plan_for(job, 2), options=Options(seed=3)).loss < 1e-6
    with_dropout = verify(job, plan_for(job, 2)).gradients
    assert with_dropout, "gradients were compared"


def test_a_plan_for_another_model_is_refused() -> None:
    plan = replace(plan_for(JOB, 2), graph="0123456789abcdef")
    with pytest.raises(PlanError, match="made for model '0123456789abcdef', not for net"):
        verify(JOB, plan)


class NotFinite(Net):
    """Its loss is right, the gradient of one entry of its last weight is not a number."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = super().forward(x, y)["loss"]
        return {"loss": loss + 0.0 * torch.sqrt(self.last.bias[0] - self.last.bias[0]).sum()}


def test_numbers_that_are_none_pass_for_nothing() -> None:
    """`max` passed over NaN, so a gradient that is no number was called equal."""
    job = Job(model=NotFinite, batch=batch, name="not finite")
    found = verify(job, plan_for(job, 2))
    assert found.loss <= found.tolerance
    assert found.gradients["last.bias"] == float("inf") and not found.passed
    with pytest.raises(VerifyError, match=r"gradient of last\.bias differs by inf"):
        found.require()
