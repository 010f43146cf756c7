"""The first time that a model is trained here, its numbers are compared with those of plain PyTorch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_net import PlainNet, job_of
from runs import capture_of, even, even_plan, plan_for, threads
from torch import Tensor, nn

from pipeloom import Job, Options, Pipeline, Plan, verification
from pipeloom.ir.errors import BatchError, VerifyError
from pipeloom.tracer.stage import joint, trace


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pipeloom" / "compared"


def train(job: Job, plan: Plan, *, compare: bool = True) -> list[float]:
    captured = capture_of(job)

    def work(rank: int, channel: object) -> float:
        options = Options(compare=compare, timeout_s=60)
        with Pipeline(job, plan, options=options, channel=channel, captured=captured) as pipeline:
            return pipeline.step(job.batch(0, 8))

    return threads(len(set(plan.placement)), work, timeout_s=60)


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


class CountsElsewhere(PlainNet):
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
    job = job_of(PlainNet)
    plan = even_plan(job, 2, microbatches=4, schedule=schedule)
    first = train(job, plan)
    assert len(list(cache.iterdir())) == len(compared.rows) == 1
    assert first == train(job, plan) == train(job, plan, compare=False)
    assert len(compared.rows) == 1
    train(job, even_plan(job, 3, microbatches=4))  # as many stages as never before
    assert len(compared.rows) == 2


class Random(PlainNet):
    def prepare(self) -> None:
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(6)

    def run(self, h: Tensor) -> Tensor:
        return super().run(self.norm(self.drop(h)))


class Decides(PlainNet):
    """A model that is cut between its modules."""

    def run(self, h: Tensor) -> Tensor:
        return super().run(h * 2 if float(h.sum()) > 0 else h)


@pytest.mark.parametrize("model", [Random, Decides])
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
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two rows per micro-batch. least: that the job makes.  fitting: as many bytes are allowed.
    quick: by the plan's times both rows are."""
    job = job_of(PlainNet)
    captured, plan = capture_of(job), even_plan(job, 2, microbatches=2)
    if not quick:
        each_s = verification.MOST_S / verification.MICROBATCHES / len(plan.stages)
        plan = replace(plan, stages=tuple(replace(stage, forward_s=each_s) for stage in plan.stages))
    compared.least = least
    plan = replace(plan, caps=(verification.needed_bytes(captured.graph, fitting / 2), 1 << 40))
    with pytest.raises(BatchError) if said is BatchError else contextlib.nullcontext():
        verification.verify_once(job, plan, captured, Options(compare=True))
    assert compared.rows == rows
    warned = [record.getMessage() for record in caplog.records if record.name == "pipeloom"]
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
def test_what_the_comparison_has_traced_is_not_traced_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[tuple[str, ...]] = []
    trace_joint = joint.trace_joint

    def noted(stage: Any, *rest: Any) -> Any:
        traced.append(stage.outputs)
        return trace_joint(stage, *rest)

    monkeypatch.setattr(trace, "trace_joint", noted)
    job = job_of(PlainNet)
    plan = even_plan(job, 1, microbatches=4)
    with Pipeline(job, plan, options=Options(compare=True)) as pipeline:
        assert len(list(cache.iterdir())) == len(traced) == 1
        assert not pipeline.captured.traced
        pipeline.step(job.batch(0, 8))


def test_it_uses_all_cores_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait meanwhile, and each goes on with one thread afterwards."""
    before, inside = torch.get_num_threads(), list[int]()

    def verify(*args: object, **options: object) -> None:
        inside.append(torch.get_num_threads())
        raise VerifyError("differs")

    monkeypatch.setattr(verification, "usable_cores", lambda: before + 2)
    monkeypatch.setattr(verification, "verify", verify)
    job = job_of(PlainNet)
    with pytest.raises(VerifyError):
        verification.compare_first(job, even_plan(job, 2, microbatches=2), capture_of(job), Options())
    assert inside == [before + 2] and torch.get_num_threads() == before


def test_replicas_are_compared_as_one() -> None:
    job = job_of(PlainNet)
    captured = capture_of(job)
    plan = plan_for(captured, even(captured.graph, 2), microbatches=4, placement=(0, 1))
    twice = replace(plan, placement=(0, 1, 1, 0))
    assert verification.compare_first(job, twice, captured, Options()).passed


def test_it_is_off_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("PIPELOOM_COMPARE", value)
        assert Options().compare is expected
    monkeypatch.delenv("PIPELOOM_COMPARE")
    assert Options().compare
