"""What ranks of one machine take from each other is measured once per machine, and plans know it."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import zoo

from pipeloom.caches import beside_ranks, contention
from pipeloom.ir.errors import ConfigError
from pipeloom.planning import capture, make_request, plan_size, profile
from pipeloom.profiler.contention import Contention, measure_contention

profiler = importlib.import_module("pipeloom.profiler.contention")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often it was measured, for how many ranks; nothing is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PIPELOOM_CONTENTION", raising=False)
    asked: list[int] = []

    def measure(ranks: int) -> Contention:
        asked.append(ranks)
        return Contention(ranks=ranks, products=2.0, others=1.5)

    monkeypatch.setattr("pipeloom.profiler.contention.measure_contention", measure)
    return asked


def test_it_is_measured_once_for_each_number_of_ranks(measured: list[int]) -> None:
    assert contention(2) == contention(2) == Contention(ranks=2, products=2.0, others=1.5)
    assert contention(3).ranks == 3 and measured == [2, 3]


def test_what_was_measured_days_ago_is_measured_again(measured: list[int], tmp_path: Path) -> None:
    contention(2)
    (file,) = tmp_path.glob("pipeloom/contention/*.json")
    os.utime(file, (0, time.time() - 2 * 24 * 3600))
    contention(2)
    assert measured == [2, 2]


@pytest.mark.parametrize("name", ["skips", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_plans_for_ranks_of_this_machine_take_it_into_account(measured: list[int], name: str) -> None:
    job = zoo.job(name)
    captured = capture(job, 2)
    alone = profile(captured)
    request = make_request(job, ranks=2, microbatch_size=2)
    _, model = plan_size(request, job, captured=captured, profiled=alone)
    assert measured == [2]
    beside = model.profiles["cpu"]
    assert beside.notes == ("beside 1 more: products x2, others x1.5",)
    for op in model.graph.ops:
        factor = 2.0 if "linear" in op.target or "addmm" in op.target or "attention" in op.target else 1.5
        assert beside.costs[op.name].backward_s == pytest.approx(factor * alone.costs[op.name].backward_s)


def test_one_rank_and_estimates_stay_as_they_are(measured: list[int]) -> None:
    job = zoo.job("gpt2")
    _, model = plan_size(make_request(job, ranks=1, microbatch_size=2), job)
    profile = model.profiles["cpu"]
    assert beside_ranks(profile, model.graph, 1) is profile
    assert beside_ranks(replace(profile, source="roofline"), model.graph, 2).notes == profile.notes
    assert measured == []


def test_a_factor_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELOOM_CONTENTION", "1.25")
    assert contention(4) == Contention(ranks=4, products=1.25, others=1.25)
    for wrong in ("0.5", "fast", "nan"):
        monkeypatch.setenv("PIPELOOM_CONTENTION", wrong)
        with pytest.raises(ConfigError, match="PIPELOOM_CONTENTION"):
            contention(4)


@pytest.mark.slow
def test_others_run_the_kernel_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes. A clock that knows what the others do: an op takes three times as long beside them."""
    told: list[str] = []
    now = [0.0]
    tell = profiler._tell

    def watch(process: object, word: str) -> None:
        told.append(word)
        tell(process, word)

    def clock() -> float:
        now[0] += 1.0 if not told or told[-1] == "rest" else 3.0
        return now[0]

    monkeypatch.setattr(profiler, "_tell", watch)
    monkeypatch.setattr(profiler, "ROUND_S", 0.0)
    monkeypatch.setattr(profiler.os, "sched_getaffinity", lambda _: {0, 1})
    assert measure_contention(2, clock=clock) == Contention(ranks=2, products=3.0, others=3.0)
    assert told == ["products", "rest"] * profiler.ROUNDS + ["others", "rest"] * profiler.ROUNDS
    told.clear()
    assert measure_contention(4, clock=clock).products == 6.0, "twice as many ranks as cores"
