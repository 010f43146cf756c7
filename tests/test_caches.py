"""What was measured is kept for a day: op times, never taken for those of other ops, and what ranks of one
machine take from each other."""

import importlib
import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from compiled import profile_of
from odd.case import Stack, job
from refusals import refused
from runs import capture_of, even_plan
from torch import Tensor

from pipeloom import Plan, PlanSettings, planning
from pipeloom.caches import beside_ranks, contention, kept_plan, kept_profile
from pipeloom.ir.errors import ConfigError
from pipeloom.ir.profile import Profile
from pipeloom.planning import make_request, plan_size
from pipeloom.profiler.contention import Contention, measure_contention
from pipeloom.tracer.captured import Captured

profiler = importlib.import_module("pipeloom.profiler.contention")


class Measured:
    """Measures nothing, and counts how often it is asked."""

    def __init__(self, folder: Path) -> None:
        self.times, self.folder = 0, folder

    def __call__(self, captured: Captured) -> Profile:
        self.times += 1
        return profile_of(captured, forward_s=float(self.times))

    @property
    def files(self) -> list[Path]:
        return list(self.folder.glob("pipeloom/profiles/*"))


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PIPELOOM_KEEP_PROFILES", raising=False)
    monkeypatch.delenv("PIPELOOM_CONTENTION", raising=False)


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


def aged(file: Path, hours: float) -> None:
    os.utime(file, (0, time.time() - hours * 3600))


def test_times_are_measured_once_a_day_and_old_ones_removed(measured, caplog):
    caplog.set_level(logging.WARNING)
    captured = capture_of(job(Stack))
    assert kept_profile(captured, measured) == kept_profile(captured, measured)
    (file,) = measured.files
    assert measured.times == 1 and not caplog.text
    aged(file, 3)
    kept_profile(captured, measured)
    assert measured.times == 1 and "measured 3 h ago" in caplog.text
    aged(file, 48)
    kept_profile(captured, measured)
    assert measured.times == 2 and measured.files == [file]
    aged(file, 48)
    kept_profile(capture_of(job(Stack), 4), measured)
    assert len(measured.files) == 1 and not file.exists()


@pytest.mark.parametrize("damage", ["no json", "an op is missing", "a negative time"])
def test_a_damaged_file_is_measured_again(measured: Measured, damage: str) -> None:
    captured = capture_of(job(Stack))
    right = kept_profile(captured, measured)
    (file,) = measured.files
    whole = json.loads(file.read_text())
    first = next(iter(whole["costs"]))
    if damage == "an op is missing":
        del whole["costs"][first]
    else:
        whole["costs"][first] = {"forward_s": -1.0}
    file.write_text("" if damage == "no json" else json.dumps(whole))
    again = kept_profile(captured, measured)
    assert measured.times == 2 and again.costs.keys() == right.costs.keys()


class OtherArguments(Stack):
    """The same names, wiring and parameters as those of `Softmax`: a graph's fingerprint is the same."""

    dim = 0

    def run(self, h: Tensor) -> Tensor:
        return torch.softmax(super().run(h), self.dim)


class Softmax(OtherArguments):
    dim = 1


def test_times_hold_for_the_same_ops_only(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (capture_of(job(model)) for model in (Softmax, OtherArguments))
    assert ours.graph.fingerprint == theirs.graph.fingerprint
    wider, halved = capture_of(job(Softmax), 4), capture_of(job(Softmax), autocast=torch.bfloat16)
    for count, captured in enumerate((ours, theirs, wider, halved), start=1):
        kept_profile(captured, measured)
        assert measured.times == count
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    kept_profile(ours, measured)
    assert measured.times == 5


@pytest.mark.parametrize("why", ["an op of others", "turned off", "no folder"])
def test_what_cannot_be_kept_is_measured_each_time(measured, why, monkeypatch):
    captured = capture_of(job(Stack))
    if why == "an op of others":
        op = replace(captured.graph.ops[0], target="mine.kernel.default")
        captured = replace(captured, graph=replace(captured.graph, ops=(op, *captured.graph.ops[1:])))
    elif why == "turned off":
        monkeypatch.setenv("PIPELOOM_KEEP_PROFILES", "0")
    else:
        (measured.folder / "pipeloom").write_text("a file where the folder would be")
    kept_profile(captured, measured)
    kept_profile(captured, measured)
    assert measured.times == 2 and not measured.files


def test_plans_take_them_and_profiles_never_do(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(Stack)
    captured, real = capture_of(made), planning.profile
    monkeypatch.setattr(planning, "profile", measured)
    models = [planning.captured_model(made, 2, None, captured=captured) for _ in range(2)]
    assert measured.times == 1 and models[0].profiles == models[1].profiles
    assert real(captured).costs != models[0].profiles["cpu"].costs


def test_a_plan_is_kept_unless_interrupted() -> None:
    captured, plan = capture_of(job(Stack)), even_plan(job(Stack), 2, microbatches=2)
    ways = ("interrupted", "converged", "interrupted")
    made = [Mock(return_value=replace(plan, notes={"search.ended": how})) for how in ways]
    for make in made:
        kept_plan(captured, make)
    assert [make.call_count for make in made] == [1, 1, 0]


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Asked for contention between so many ranks."""
    mock = Mock(side_effect=lambda ranks: Contention(ranks=ranks, products=2.0, others=1.5))
    monkeypatch.setattr("pipeloom.profiler.contention.measure_contention", mock)
    return mock


def test_contention_is_measured_once_a_day_for_each_number_of_ranks_unless_given(measures, monkeypatch):
    assert contention(2) == contention(2) == Contention(ranks=2, products=2.0, others=1.5)
    assert contention(3).ranks == 3
    monkeypatch.setenv("PIPELOOM_CONTENTION", "1.25")
    assert contention(4) == Contention(ranks=4, products=1.25, others=1.25)
    assert measures.call_args_list == [call(2), call(3)]
    monkeypatch.setenv("PIPELOOM_CONTENTION", "2000")
    assert contention(4).products == 2000
    for wrong in ("0.5", "fast", "nan", "inf"):
        monkeypatch.setenv("PIPELOOM_CONTENTION", wrong)
        assert "PIPELOOM_CONTENTION" in refused(ConfigError, contention, 4)


def test_plans_for_ranks_of_this_machine_take_it_into_account(measures: Mock) -> None:
    captured = capture_of(job(Stack))
    alone = planning.profile(captured)
    how = {"captured": captured, "profiled": alone}
    _, model = plan_size(make_request(ranks=2, microbatch_size=2), job(Stack), **how)
    measures.assert_called_once_with(2)
    beside = model.profiles["cpu"]
    for op in model.graph.ops:
        factor = 2.0 if "linear" in op.target or "addmm" in op.target else 1.5
        assert beside.costs[op.name].backward_s == pytest.approx(factor * alone.costs[op.name].backward_s)
    # One rank and estimates stay as they are.
    assert beside_ranks(alone, model.graph, 1) is alone
    assert beside_ranks(replace(alone, source="roofline"), model.graph, 2).notes == alone.notes


@pytest.mark.slow
def test_others_run_the_kernel_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes. A clock that knows what the others do: an op takes three times as long beside them."""
    tell, now = Mock(wraps=profiler._tell), [0.0]

    def told() -> list[str]:
        return [call.args[1] for call in tell.call_args_list]

    def clock() -> float:
        now[0] += 1.0 if told()[-1:] in ([], ["rest"]) else 3.0
        return now[0]

    monkeypatch.setattr(profiler, "_tell", tell)
    monkeypatch.setattr(profiler, "ROUND_S", 0.0)
    monkeypatch.setattr(profiler.os, "sched_getaffinity", lambda _: {0, 1})
    assert measure_contention(2, clock=clock) == Contention(ranks=2, products=3.0, others=3.0)
    assert told() == ["products", "rest"] * profiler.ROUNDS + ["others", "rest"] * profiler.ROUNDS
    for ranks, products in ((4, 6.0), (4000, 6000.0)):
        tell.reset_mock()
        assert measure_contention(ranks, clock=clock).products == products, "more ranks than cores"


def test_a_plan_is_kept_for_one_contention_and_schedules_of_the_library(measured, monkeypatch, tmp_path):
    captured, file = capture_of(job(Stack)), tmp_path / "rows.txt"
    monkeypatch.setattr(planning, "profile", measured)

    def planned(factor: str, **more: object) -> Plan:
        monkeypatch.setenv("PIPELOOM_CONTENTION", factor)
        settings = PlanSettings(ranks=2, microbatches=2, microbatch_size=2, planner="equal", **more)
        return planning.plan_here(job(Stack), settings, captured, device="cpu")

    once, slowed, again = (planned(factor).predicted_step_s for factor in ("1", "10", "1"))
    assert once == again < slowed
    for second in ("1F0 1F1 1B0 1B1", "1F0 1B0 1F1 1B1"):
        file.write_text(f"0F0 0F1 0B0 0B1\n{second}\n")
        assert planned("1", schedule=str(file)).schedule_rows[1] == second
