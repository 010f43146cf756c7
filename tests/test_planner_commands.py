"""Every planner through the commands: plan with what-if and rehearsal, verify --plan, train, bench."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeloom import planning
from pipeloom.cli import main
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.plan import Plan, load_plan
from pipeloom.planner.planners import PLANNERS, FastestPlan
from pipeloom.profiler.roofline import roofline
from pipeloom.tracer.captured import Captured

JOB = """
import torch
from torch import nn
from pipeloom import Job

WIDTHS = (8, 16, 16, 16, 16, 16, 16, 16, 64)

class Odd(nn.Module):
    '''A head that is dearer than all the rest: stages cannot be equal.'''

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:]))

    def forward(self, x, target):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.layers[-1](x), target)

def batch(seed, size):
    drawn = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 8, generator=drawn), "target": torch.randint(64, (size,), generator=drawn)}

def job():
    return Job(name="odd", model=Odd, batch=batch, loss=lambda output, batch: output)
"""


CLUSTER = """
[[device]]
name = "slow"
count = 2
memory = "1GiB"
flops_per_s = { float32 = 1e9 }
memory_bytes_per_s = 1e12
[within_node]
bandwidth = "1GB"
"""


SMALL = ("--ranks", "2", "--microbatches", "4")


SEARCHED = ("auto",)
"""Planners whose plan of this model has a searched order, which is no schedule of the library."""


every_planner = pytest.mark.parametrize("name", PLANNERS)


quick_for_searched_orders = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SEARCHED else pytest.mark.slow) for name in PLANNERS]
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a job and a cluster. `auto` asks two quick planners: those that it asks are tested elsewhere."""
    (tmp_path / "odd.py").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], plan=FastestPlan(("exact", "balanced"))))
    return tmp_path


@pytest.fixture
def steady_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of this machine take what its figures say, so that the same plan wins wherever the tests run."""

    def estimated(captured: Captured, measure: object) -> object:
        return roofline(captured.graph, cpu_cluster(1).devices[0])

    monkeypatch.setattr(planning, "kept_profile", estimated)


def run(*words: str | Path) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def has_its_order(plan: Plan, name: str) -> bool:
    return plan.planner == name and (plan.schedule == "searched") == (name in SEARCHED)


@every_planner
def test_a_plan_is_planned_again(folder: Path, name: str) -> None:
    words = ("--planner", name, *SMALL, "--cluster", "cluster.toml", "-o", "plan.json", "--json")
    figures = json.loads(run("plan", "odd.py:job", *words))
    assert has_its_order(load_plan(folder / "plan.json"), name)
    changes = {change["what"]: change for change in figures["what_if"]}
    assert set(changes) == {"10 % more memory", "10 % more bandwidth between devices"}
    # Memory was no limit, so that more of it gives the same plan: planned again alike, order and all.
    assert changes["10 % more memory"]["step_s"] == figures["predicted_step_s"]
    assert changes["10 % more bandwidth between devices"]["gain"] > -1e-9
    if name in SEARCHED:
        assert json.loads(run("verify", "odd.py:job", "--plan", "plan.json", "--json"))["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*PLANNERS} - {*SEARCHED}))
def test_a_plan_is_verified(folder: Path, name: str) -> None:
    words = ("--planner", name, *SMALL, "--cluster", "cluster.toml", "-o", "plan.json", "--no-what-if")
    run("plan", "odd.py:job", *words)
    assert json.loads(run("verify", "odd.py:job", "--plan", "plan.json", "--json"))["passed"]


@quick_for_searched_orders
def test_a_plan_for_this_machine_is_planned_again_and_rehearsed(
    folder: Path, name: str, steady_times: None
) -> None:
    words = ("--planner", name, *SMALL, "-o", "plan.json", "--json")
    figures = json.loads(run("plan", "odd.py:job", *words))
    assert has_its_order(load_plan(folder / "plan.json"), name)
    assert figures["predicted_by"] == "rehearsal" and len(figures["what_if"]) >= 2


@pytest.mark.slow
@every_planner
def test_a_run_is_planned_resumed_and_planned_again(folder: Path, name: str, steady_times: None) -> None:
    words = ("train", "--out", "run", "--set", "steps=2", "--set", "pipeline.microbatches=4", "--json")
    assert json.loads(run(*words, "--job", "odd.py:job", "--planner", name))["steps"] == 2
    plan = load_plan(folder / "run" / "plan.json")
    assert has_its_order(plan, name)
    plan.save(folder / "plan.json")
    (folder / "run").rename("first")
    run(*words, "--job", "odd.py:job", "--set", "pipeline.plan=plan.json")
    assert load_plan(folder / "run" / "plan.json") == plan
    again = ("--set", "pipeline.plan=", "--set", "pipeline.microbatches=6", "--steps", "3")
    figures = json.loads(run("train", "--out", "run", "--resume", "--json", *again))
    assert (figures["steps"], figures["microbatches"]) == (3, 6)
    assert load_plan(folder / "run" / "plan.json").planner == name


@quick_for_searched_orders
def test_a_plan_is_timed(folder: Path, name: str, steady_times: None) -> None:
    words = ("--planner", name, *SMALL, "--steps", "1", "--warmup", "1", "--json")
    figures = json.loads(run("bench", "odd.py:job", *words))
    assert (figures["schedule"] == "searched") == (name in SEARCHED) and figures["step_s"] > 0
