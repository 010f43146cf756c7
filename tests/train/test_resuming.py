"""What a resumed run may change without being planned anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.ir.errors import PipeloomError
from pipeloom.ir.plan import Plan
from pipeloom.train.config import Config
from pipeloom.train.config_text import write_config
from pipeloom.train.rank_processes import RankProcesses
from pipeloom.train.run import TrainRequest, prepare_run


class PlannedAnew(PipeloomError):
    pass


def plan_anew(*_: object) -> Plan:
    raise PlannedAnew("")


@pytest.fixture
def run(tiny: Config, tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text(write_config(tiny))
    return tmp_path / "a"


def resumed(run: Path, *overrides: str) -> Config:
    request = TrainRequest(out=run, resume=True, overrides=("steps=20", *overrides))
    return prepare_run(request, RankProcesses(), plan_anew).config


def test_what_planning_does_not_read_leaves_the_plan(run: Path) -> None:
    for setting in ("offload_dir=elsewhere", "accumulate=2", "compile=true"):
        resumed(run, f"pipeline.{setting}")
    found = resumed(run, "optimizer.learning_rate=0.5").pipeline
    assert (found.offload_dir, found.accumulate, found.compile) == ("elsewhere", 2, True)


@pytest.mark.parametrize(
    "setting",
    [
        "ranks=1",
        "schedule=gpipe",
        "microbatches=4",
        "microbatch_size=4",
        "split_backward=true",
        "memory=1GiB",
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
