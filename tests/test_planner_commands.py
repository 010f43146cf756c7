"""Planners of every kind in commands: plan with what-if and rehearsal, verify --plan, train, bench."""

from dataclasses import replace
from pathlib import Path

import commands
import pytest
from commands import figures, good

from pipeloom import planning
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.plan import load_plan
from pipeloom.planner.planners import PLANNERS, JointPlanner
from pipeloom.profiler.roofline import roofline

MODEL = "mine.py:odd"
SMALL = ("--ranks", "2", "--microbatches", "4")
SEARCHED = ("auto",)
"""Planners whose plan of this model has a searched order, which is no schedule of the library."""

KINDS = ("auto", "exact", "dawnpiper", "pipeoffload", "graphpipe", "piper")
"""Planners that commands may treat otherwise: searches without and with copies; one cut, the best of
several, and stages side by side; cuts of the whole graph."""

each_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(autouse=True)
def fast_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` tries two schedules with one quick planner: the others are tested elsewhere."""
    text = commands.CLUSTER.replace("memory_bytes_per_s = 1e9", "memory_bytes_per_s = 1e12")
    (folder / "cluster.toml").write_text(text)
    few = JointPlanner(schedules=lambda _: ("1f1b", "gpipe"), axes=("cuts",), planners=("exact",))
    monkeypatch.setitem(PLANNERS, "auto", replace(PLANNERS["auto"], plan=few))


@pytest.mark.sampled("auto", "exact", "piper")
@each_kind
def test_a_plan_is_planned_again(folder: Path, name: str) -> None:
    words = ("--planner", name, *SMALL, "--cluster", "cluster.toml", "-o", "plan.json")
    planned = figures("plan", MODEL, *words)
    plan = load_plan(folder / "plan.json")
    assert plan.planner == name and (plan.schedule == "searched") == (name in SEARCHED)
    changes = {change["what"]: change for change in planned["what_if"]}
    assert set(changes) == {"10 % more memory", "10 % more bandwidth between devices", "one more device"}
    # Memory was no limit, so that more of it gives the same plan: planned again alike, order and all.
    assert changes["10 % more memory"]["step_s"] == planned["predicted_step_s"]
    assert changes["10 % more bandwidth between devices"]["gain"] > -1e-9
    if name in SEARCHED:
        assert figures("verify", MODEL, "--plan", "plan.json")["passed"]


@pytest.mark.slow
@each_kind
def test_a_run_is_planned_resumed_and_planned_again(folder, name, monkeypatch):
    """Ops of this machine take what its figures say, so that the same plan wins wherever the tests run. No
    order is searched for its own cores."""
    device = cpu_cluster(1).devices[0]
    monkeypatch.setattr(planning, "kept_profile", lambda captured, _: roofline(captured.graph, device))
    words = ("train", "--out", "run", "--set", "steps=2", "--set", "pipeline.microbatches=4")
    assert figures(*words, "--job", MODEL, "--planner", name)["steps"] == 2
    file = folder / "run" / "plan.json"
    assert load_plan(file).planner == name and load_plan(file).schedule != "searched"
    (folder / "plan.json").write_bytes(file.read_bytes())
    (folder / "run").rename("first")
    good(*words, "--job", MODEL, "--set", "pipeline.plan=plan.json")
    assert load_plan(file) == load_plan(folder / "plan.json")
    again = ("--set", "pipeline.plan=", "--set", "pipeline.microbatches=6", "--steps", "3")
    run = figures("train", "--out", "run", "--resume", *again)
    assert (run["steps"], run["microbatches"]) == (3, 6)
    assert load_plan(file).planner == name
