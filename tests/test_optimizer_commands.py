"""Commands with jobs that bring their own optimizers: two in one, and one that is refused."""

import inspect
import json
from pathlib import Path

import optimizers
import pytest
from click.testing import CliRunner, Result

from pipeloom.cli import main

MINE = f"""
import torch
from collections.abc import Iterable
from typing import Any
from torch import nn
from pipeloom import Job

{inspect.getsource(optimizers.MuonAndAdamW)}

def batch(seed, rows):
    return {{"input": torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))}}

def of(optimizer):
    def model():
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

    return Job(model=model, batch=batch, loss=lambda out, batch: out.square().mean(), optimizer=optimizer)

def both():
    return of(MuonAndAdamW)

def muon():
    return of(torch.optim.Muon)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_two_optimizers_in_one_are_planned_simulated_and_verified() -> None:
    cluster = ("--cluster", "2 x a100-40")
    planned = run("plan", "mine.py:both", *cluster, "--ranks", "2", "--json", "-o", "plan.json")
    assert planned.exit_code == 0, planned.output
    kept = [stage["memory"]["optimizer"] for stage in json.loads(Path("plan.json").read_text())["stages"]]
    assert sum(kept) == 4 * (16 * 16 * 4 + 16 * 8 + 4)  # a momentum; two averages and a count
    simulated = run("simulate", "plan.json", "mine.py:both", *cluster, "--json")
    assert [rank["peaks"]["optimizer"] for rank in json.loads(simulated.output)["ranks"]] == kept
    for more in ((), ("--replicas", "2", "--shard-optimizer")):
        verified = run("verify", "mine.py:both", "--ranks", "2", *more)
        assert verified.exit_code == 0 and "equal within" in verified.output, verified.output


def test_a_saved_graph_has_the_optimizer_on_the_devices_that_it_was_saved_for() -> None:
    """It had what the optimizer takes on CPUs."""
    cluster = ("--cluster", "2 x a100-40")
    assert run("plan", "mine.py:both", *cluster, "--ranks", "2", "-o", "plan.json").exit_code == 0
    assert run("profile", "mine.py:both", *cluster, "--save-graph", "graph.json").exit_code == 0
    updates = [p["given_update"] for p in json.loads(Path("graph.json").read_text())["parameters"]]
    assert {update["together"] for update in updates} == {True, False}  # AdamW's and Muon's
    saved, model = (
        json.loads(run("simulate", "plan.json", *which, *cluster, "--json").output)
        for which in (("--graph", "graph.json"), ("mine.py:both",))
    )
    assert saved["ranks"] == model["ranks"]


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_an_optimizer_that_is_refused_gives_a_sentence_that_names_the_parameter(command: str) -> None:
    refused = run(command, "mine.py:muon", "--ranks", "2")
    assert refused.exit_code == 1 and isinstance(refused.exception, SystemExit)
    assert "0.bias" in refused.output and "2D" in refused.output and "hint" in refused.output
