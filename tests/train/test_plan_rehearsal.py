"""`pipeloom plan` for this machine says what its ranks rehearse, not what ops add up to that ran alone."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from compiled import KnownRatios
from tests.support import zoo

from pipeloom import plan as plan_job
from pipeloom.cli import main
from pipeloom.commands.plan import PlannedStep
from pipeloom.ir.plan import load_plan
from pipeloom.ir.text import parse_bytes
from pipeloom.planning import make_request, plan_size
from pipeloom.train.loop import LONG_STEP_S
from pipeloom.train.plan_rehearsal import why_not_rehearsed

JOB = """
import torch
from pipeloom import Job

def job():
    def batch(seed, size):
        return {"x": torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))}
    return Job(model=Model, batch=batch, loss=lambda outputs, batch: outputs.square().mean())

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a job; no process is started, and a rehearsal is one walk."""
    (tmp_path / "rehearsed_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("pipeloom.train.rank_processes.StartedRanks", lambda *_, **__: nullcontext())
    monkeypatch.setattr("pipeloom.forecast.ENOUGH_S", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def plan(*words: str) -> str:
    flags = ["rehearsed_job.py:job", "-p", "1", "-m", "2", "--no-what-if", *words]
    return " ".join(CliRunner().invoke(main, ["plan", *flags], catch_exceptions=False).stdout.split())


def rank_here(rank: Any, ranks: int, *, args: tuple[Any, ...]) -> int:
    """The only rank, in this process."""
    assert ranks == 1
    rank(*args)
    return 0


def test_a_plan_for_this_machine_is_rehearsed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", rank_here)
    figures = json.loads(plan("--json", "-o", "plan.json"))
    assert figures["predicted_by"] == "rehearsal" and figures["not_rehearsed"] is None
    # All that a rank does around three small products takes longer than these alone.
    assert figures["predicted_step_s"] > figures["profiled_step_s"] > 0
    assert load_plan(folder / "plan.json").predicted_step_s == figures["profiled_step_s"]
    assert "as its ranks rehearsed it here" in plan()
    # What 10 % more of something would make stands beside the plan's own step, and is on its scale.
    figures = json.loads(plan("--json", "--what-if"))
    assert figures["what_if"]
    for change in figures["what_if"]:
        gained = 1 - change["step_s"] / figures["predicted_step_s"]
        assert gained == pytest.approx(change["gain"], abs=1e-9)


def test_a_plan_for_compiled_stages_says_so_and_is_rehearsed_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeloom.profiler.compiled_pieces.measure_piece", KnownRatios())
    seen: list[bool] = []

    def rank(ranks_do: Any, ranks: int, *, args: tuple[Any, ...]) -> int:
        seen.append(args[-1].compile)
        return rank_here(ranks_do, ranks, args=(*args[:-1], replace(args[-1], compile=False)))

    monkeypatch.setattr("pipeloom.train.rank_processes.launch", rank)
    how = "forwards 0.50 and backwards 3.00 times as long as eager"
    assert f"times of compiled functions: {how}" in plan("--compile", "-o", "plan.json")
    assert load_plan(folder / "plan.json").notes == {"compiled": how}
    assert json.loads(plan("--compile", "--json"))["compiled"] == how
    assert json.loads(plan("--json"))["compiled"] is None
    assert seen == [True, True, False]


@pytest.mark.parametrize("words", [["--no-rehearse"], ["--cluster", "1 x cpu"]])
def test_a_plan_says_why_it_is_not_rehearsed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(
        "pipeloom.train.plan_rehearsal.rehearse_plan", lambda *_, **__: pytest.fail("it was rehearsed")
    )
    figures = json.loads(plan("--json", *words))
    assert figures["predicted_by"] == ("roofline" if "--cluster" in words else "profile")
    assert figures["predicted_step_s"] == figures["profiled_step_s"]
    assert f"not rehearsed: {figures['not_rehearsed']}" in plan(*words)


def test_ranks_that_fail_leave_the_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", lambda *_, **__: 137)
    figures = json.loads(plan("--json", "-o", "plan.json"))
    assert figures["not_rehearsed"] == "its ranks ended with exit status 137"
    assert figures["predicted_by"] == "profile" and (folder / "plan.json").is_file()


def test_what_branches_gain_is_told_of_the_rehearsed_step() -> None:
    steps = {"branches.step_s": "0.2", "no_branches.step_s": "0.3", "no_branches.sequential_step_s": "0.4"}
    notes = {**steps, "branches.depth": "3", "planner": "x"}
    simulated = plan_job(zoo.job("skips"), ranks=1, microbatches=2, microbatch_size=2, cluster="1 x cpu")
    step = PlannedStep(profiled_s=0.2, rehearsed_s=0.5)
    told = step.told(replace(simulated, notes=notes))
    assert told.predicted_step_s == 0.5
    assert {key: float(told.notes[key]) for key in notes if "step_s" in key} == {
        "branches.step_s": pytest.approx(0.5),
        "no_branches.step_s": pytest.approx(0.75),
        "no_branches.sequential_step_s": pytest.approx(1.0),
    }
    assert (told.notes["branches.depth"], told.notes["planner"]) == ("3", "x")


def test_what_would_take_long_or_much_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    job = zoo.job("skips")
    request = make_request(job, ranks=1, microbatches=2, microbatch_size=2)
    made, _ = plan_size(request, job)
    assert why_not_rehearsed(request, made) == ""
    slow = replace(made, predicted_step_s=2 * LONG_STEP_S)
    assert "as long as a few steps" in why_not_rehearsed(request, slow)
    large = replace(made, peaks=(parse_bytes("900TiB"),))
    assert "its ranks need 900" in why_not_rehearsed(request, large)
    wide = request.changed(replicas=10_000)
    assert "it is for 10000 ranks" in why_not_rehearsed(wide, made)
    forward_only = replace(made, schedule_rows=("0F0 0F1",))
    assert "no backwards" in why_not_rehearsed(request, forward_only)
    monkeypatch.setenv("RANK", "0")
    assert "one of several ranks" in why_not_rehearsed(request, made)


@pytest.mark.slow
def test_two_ranks_rehearse_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rehearsed_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["plan", "rehearsed_job.py:job", "-p", "2", "-m", "4", "--json"]
    figures = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    assert figures["predicted_by"] == "rehearsal" and figures["predicted_step_s"] > 0
    assert capfd.readouterr().err == ""
