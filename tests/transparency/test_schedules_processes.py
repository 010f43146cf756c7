"""Every schedule of the library in real processes over gloo."""

import json
from pathlib import Path

import pytest
from every_schedule import SYNCHRONOUS
from schedule_ranks import compare_each, resume_elsewhere

from pipeloom.runtime.launch.launch import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 4])
def test_trains_and_evaluates_as_one_process(ranks: int, tmp_path: Path) -> None:
    names, file = ["forward_only", *SYNCHRONOUS], tmp_path / "differences.json"
    assert launch(compare_each, ranks, args=(names, 2 * ranks, "float64", file)) == 0
    table = json.loads(file.read_text())
    assert list(table) == names
    worst = {name: max(found.values()) for name, found in table.items()}
    assert max(worst.values()) <= 1e-12, worst


def test_pipelines_side_by_side(tmp_path: Path) -> None:
    names, file = ["forward_only", "1f1b", "zb_v"], tmp_path / "differences.json"
    assert launch(compare_each, 4, args=(names, 8, "float64", file, 2, True)) == 0
    assert max(max(found.values()) for found in json.loads(file.read_text()).values()) <= 1e-12


def test_a_checkpoint_of_replicas_loads_into_another_plan(tmp_path: Path) -> None:
    """Names are saved once, whoever holds them."""
    assert launch(resume_elsewhere, 2, args=(tmp_path,)) == 0
    index = json.loads((tmp_path / "0" / "step-00000002" / "index.json").read_text())
    assert index["step"] == 2
