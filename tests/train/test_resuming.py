"""What a resumed run may change without being planned anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.ir.errors import PipeloomError
from pipeloom.train import Config, Request, settle, write_config


class PlannedAnew(PipeloomError):
    pass


@pytest.fixture
def run(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def plan(*_: object) -> None:
        raise PlannedAnew("")

    monkeypatch.setattr("pipeloom.train.run.make_plan", plan)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text(write_config(tiny))
    return tmp_path / "a"


def resumed(run: Path, *overrides: str) -> Config:
    return settle(Request(out=run, resume=True, overrides=("steps=20", *overrides))).config


def test_what_planning_does_not_read_leaves_the_plan(run: Path) -> None:
    for setting in ("offload_dir=elsewhere", "accumulate=2", "compile=true"):
        resumed(run, f"pipeline.{setting}")
    found = resumed(run, "optimizer.learning_rate=0.5").pipeline
    assert (found.offload_dir, found.accumulate, found.compile) == ("elsewhere", 2, True)


@pytest.mark.parametrize(
    "setting",
    [
        "stages=1",
        "schedule=gpipe",
        "microbatches=4",
        "microbatch_size=4",
        "split_backward=true",
        "device_memory=1GiB",
        "autocast=bfloat16",
        "device=cuda",
    ],
)
def test_what_planning_reads_plans_anew(run: Path, setting: str) -> None:
    with pytest.raises(PlannedAnew):
        resumed(run, f"pipeline.{setting}")


def test_another_model_plans_anew(run: Path) -> None:
    with pytest.raises(PlannedAnew):
        resumed(run, "model.layers=2")
