"""Who starts the ranks captures the model, once: a rank only makes its own stage of what it is handed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeloom.settings import PlanSettings
from pipeloom.train.benchmark import Bench, run_bench
from pipeloom.train.config import Config
from pipeloom.train.config_text import write_config
from pipeloom.train.rank_processes import RankProcesses
from pipeloom.train.run import TrainRequest, run


def refuse_to_export(*_: object, **__: object) -> None:
    raise AssertionError("a rank exported the model again")


def launch_here(rank: Callable[..., None], ranks: int, *, args: tuple[Any, ...]) -> int:
    """One rank, in this process, in which nothing can be exported."""
    assert ranks == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.export, "export", refuse_to_export)
        rank(*args)
    return 0


@pytest.fixture
def started(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Starts a run of one rank, as `launch_here` does."""
    monkeypatch.setattr("pipeloom.train.rank_processes.launch", launch_here)
    monkeypatch.setattr("pipeloom.forecast.ENOUGH_S", 0.0)
    config = replace(tiny, steps=2, pipeline=replace(tiny.pipeline, ranks=1))
    (tmp_path / "config.toml").write_text(write_config(config))

    def start(*overrides: str, **request: Any) -> int:
        made = TrainRequest(out=tmp_path / "run", overrides=overrides, as_json=True, **request)
        return run(made, RankProcesses())

    return start


def test_a_rank_trains_and_validates_what_it_was_handed(
    started: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what runs that nobody asked for."""

    def said() -> str:
        return " ".join(capsys.readouterr().err.split())

    unasked = "before the first step the ranks rehearse one, which the forecast is made of"
    assert started(file=tmp_path / "config.toml") == 0
    assert f"{unasked}, and the model is validated as it begins" in said()
    # Going on plans nothing, and captures once all the same.
    assert started("steps=3", resume=True) == 0
    assert unasked in (text := said()) and "validated as it begins" not in text


def test_bench_does_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One step is one step: no rehearsals, and the line says where the prediction is from."""
    job = tmp_path / "small_job.py"
    job.write_text(
        """import torch
from pipeloom import Job

def job():
    def batch(seed, size):
        ids = torch.randint(8, (size, 5), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}
    return Job(model=Model, batch=batch)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""
    )

    def refuse_to_rehearse(*_: object, **__: object) -> None:
        raise AssertionError("a step that nobody asked for was run")

    monkeypatch.setattr("pipeloom.train.rank_processes.launch", launch_here)
    monkeypatch.setattr("pipeloom.runtime.calibration.rehearsal.Rehearsal.time_actions", refuse_to_rehearse)
    settings = PlanSettings(ranks=1, microbatches=2, microbatch_size=2)
    bench = Bench(model=f"{job}:job", settings=settings, steps=1, warmup=0, as_json=False)
    assert run_bench(bench, RankProcesses()) == 0
    printed = capsys.readouterr().out
    assert "(median of 1)" in printed and "by the plan's profile" in printed
    tokens, rows = re.search(r"([\d,.]+) tokens/s \(([\d,.]+) rows/s\)", printed).groups()  # type: ignore[union-attr]
    assert float(tokens.replace(",", "")) == pytest.approx(5 * float(rows.replace(",", "")), rel=0.02)


@pytest.mark.slow
def test_a_long_step_comes_first_and_nothing_else_runs(
    started: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    walks: list[int] = []
    monkeypatch.setattr("pipeloom.runtime.calibration.rehearsal.Rehearsal.time_actions", walks.append)
    monkeypatch.setattr("pipeloom.train.loop.LONG_STEP_S", 0.0)
    assert started(file=tmp_path / "config.toml") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert walks == [] and [line["step"] for line in lines] == [1, 2]
    assert lines[-1]["validation_loss"] > 0
    figures = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert figures["rehearsals"] == [] and figures["forecast"]["step_s"] > 0
    assert "rehearses none, the forecast is the plan's" in " ".join(capsys.readouterr().err.split())
