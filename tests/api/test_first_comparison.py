"""The first time that a model is trained here, its numbers are compared with those of plain PyTorch."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
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
    with pytest.raises(VerifyError, match="CountsElsewhere does not train as in plain PyTorch: in its"):
        train(job, plan)
    assert len(train(job, plan, compare=False)) == stages


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_model_that_is_equal_is_remembered(
    cache: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Plan] = []
    compare = verification.compare_first

    def counted(job: Job, plan: Plan, *rest: object) -> object:
        compared.append(plan)
        return compare(job, plan, *rest)

    monkeypatch.setattr(verification, "compare_first", counted)
    job = job_of(PlainNet)
    plan = even_plan(job, 2, microbatches=4, schedule=schedule)
    first = train(job, plan)
    assert len(list(cache.iterdir())) == len(compared) == 1
    assert first == train(job, plan) == train(job, plan, compare=False)
    assert len(compared) == 1
    train(job, even_plan(job, 3, microbatches=4))  # as many stages as never before
    assert len(compared) == 2


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


def test_what_does_not_fit_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(PlainNet)
    plan = replace(even_plan(job, 2, microbatches=4), caps=(3_000, 10_000_000))
    need = verification.needed_bytes(capture_of(job).graph)
    assert need > 3_000 and verification.limit_bytes(plan) == 3_000
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        verification.require_equal_once(job, plan, capture_of(job), Options(compare=True))
    assert "PlainNet was not compared with plain PyTorch before its first step: that needs" in caplog.text
    assert not cache.exists()


def test_what_fits_with_fewer_rows_is_compared_with_these(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int | None] = []
    compare = verification.compare_first

    def noted(*call: Any) -> object:
        seen.append(call[4])
        return compare(*call)

    monkeypatch.setattr(verification, "compare_first", noted)
    for model, message in ((PlainNet, ""), (CountsElsewhere, "does not train as in plain PyTorch")):
        job = job_of(model)
        plan = even_plan(job, 2, microbatches=2)
        captured = capture_of(job)
        state = verification.needed_bytes(captured.graph, 0.0)
        row = (verification.needed_bytes(captured.graph) - state) // plan.microbatch_size
        assert plan.microbatch_size > 1
        monkeypatch.setattr(verification, "limit_bytes", lambda _, limit=state + row: limit)
        refused = pytest.raises(VerifyError, match=message) if message else contextlib.nullcontext()
        with refused, caplog.at_level(logging.WARNING, logger="pipeloom"):
            verification.require_equal_once(job, plan, captured, Options(compare=True))
    assert seen == [1, 1]
    assert "PlainNet was compared with plain PyTorch in micro-batches of 1 row; with 2" in caplog.text
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("refused", [False, True])
def test_what_takes_long_is_compared_with_fewer_rows(
    cache: Path, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the plan's times; and with all its rows where the job has no smaller batches."""
    seen: list[int | None] = []
    compare = verification.compare_first

    def noted(*call: Any) -> object:
        seen.append(call[4])
        if refused and call[4] == 1:
            raise BatchError("no batch of 2 rows")
        return compare(*call)

    monkeypatch.setattr(verification, "compare_first", noted)
    job = job_of(PlainNet)
    plan = even_plan(job, 2, microbatches=2)
    each_s = verification.MOST_S / verification.MICROBATCHES / len(plan.stages)
    slow = replace(plan, stages=tuple(replace(stage, forward_s=each_s) for stage in plan.stages))
    assert verification.quick_rows(plan) == plan.microbatch_size == 2
    assert verification.quick_rows(slow) == 1
    with caplog.at_level(logging.WARNING, logger="pipeloom"):
        verification.require_equal_once(job, slow, capture_of(job), Options(compare=True))
    assert seen == ([1, 2] if refused else [1])
    said = "in micro-batches of 1 row; with 2, as it is trained, that would take more than 20 s"
    assert (said in caplog.text) is not refused
    assert len(list(cache.iterdir())) == 1


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


@pytest.mark.parametrize("fails", [False, True])
def test_it_uses_all_cores_and_gives_them_back(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait meanwhile, and each goes on with one thread afterwards."""
    before, inside = torch.get_num_threads(), list[int]()

    def compare(*args: object, **options: object) -> None:
        inside.append(torch.get_num_threads())
        if fails:
            raise VerifyError("differs")

    monkeypatch.setattr(verification, "usable_cores", lambda: before + 2)
    monkeypatch.setattr(verification, "compare", compare)
    job = job_of(PlainNet)
    with pytest.raises(VerifyError) if fails else contextlib.nullcontext():
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
