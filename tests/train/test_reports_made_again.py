"""A run that was killed between its last checkpoint and its report, and one whose report was removed."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from runs import even_plan

from pipeloom.train.config import Config
from pipeloom.train.config_text import write_config
from pipeloom.train.rank_processes import RankProcesses, run_rank
from pipeloom.train.run import PlannedRun, TrainRequest, prepare_run, run
from pipeloom.train.workload import Workload

MODULE = sys.modules[run.__module__]
REPORT = ("summary.json", "report.html", "trace.json")


def one_stage(config: Config, workload: Workload, console: object) -> PlannedRun:
    return PlannedRun(even_plan(workload.job, 1, microbatches=config.pipeline.microbatches))


@pytest.fixture
def start(tiny: Config, tmp_path: Path) -> Callable[..., None]:
    """Train in this process, as the only rank."""
    short = replace(tiny, steps=2, pipeline=replace(tiny.pipeline, ranks=1))
    (tmp_path / "config.toml").write_text(write_config(short))

    def start(*overrides: str, resume: bool = False) -> None:
        file = None if resume else tmp_path / "config.toml"
        request = TrainRequest(file=file, overrides=overrides, out=tmp_path / "a", resume=resume)
        run_rank(MODULE._train_rank, prepare_run(request, RankProcesses(), one_stage))

    return start


def steps_of(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("missing", [REPORT, pytest.param(REPORT[1:], marks=pytest.mark.slow)])
def test_a_run_that_lacks_only_its_report_gets_it(
    start: Callable, tmp_path: Path, missing: tuple[str, ...]
) -> None:
    """It was killed after its last checkpoint: `--resume` doubled it without a word."""
    out = tmp_path / "a"
    start()
    for name in missing:
        (out / name).unlink()
    start(resume=True)
    assert steps_of(out) == [0, 1, 2]
    figures = json.loads((out / "summary.json").read_text())
    assert (figures["steps"], figures["first_step"], figures["measured"]) == (2, 2, None)
    assert all(figures["train_loss"]) and all((out / name).is_file() for name in REPORT)


@pytest.mark.slow
def test_the_report_of_fewer_steps_is_none(start: Callable, tmp_path: Path) -> None:
    start()
    summary = (tmp_path / "a" / "summary.json").read_text()
    start("steps=4", resume=True)
    (tmp_path / "a" / "summary.json").write_text(summary)  # killed before the new one was written
    start(resume=True)
    assert steps_of(tmp_path / "a") == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["steps"] == 4


def test_it_is_said(start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    start()
    started: list[object] = []
    monkeypatch.setattr(
        "pipeloom.train.rank_processes.launch", lambda *args, **kwargs: started.append(args) or 0
    )
    request = TrainRequest(out=tmp_path / "a", resume=True, overrides=("steps=2",))
    run(request, RankProcesses())
    assert "is finished: 2 of 2 steps are done" in capsys.readouterr().out and not started
    (tmp_path / "a" / "summary.json").write_text("")
    run(request, RankProcesses())
    said = (
        "had done its 2 steps and has no report of them: it is written now. To train on: --resume --steps 4"
    )
    assert said in capsys.readouterr().out.replace("\n", " ") and started
