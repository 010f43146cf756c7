"""Schedules swapped with torch.distributed.pipelining, in real processes: each runtime runs the other's."""

import json
from pathlib import Path

import pytest
from torch_pipelining import ours_in_torch, torchs_in_ours

from pipeloom.runtime.launch import launch
from pipeloom.schedules import registry

pytestmark = pytest.mark.slow  # that torch loads our files is quick, in tests/schedules/test_csv.py
TOLERANCE = 1e-12
ONE_WAY = [
    name
    for name in registry.names()
    if name != "forward_only"
    and not registry.entry(name).lacks
    and registry.entry(name).place != "both ways"
    and name not in ("po_h", "po_f")  # torch knows no copies to the host
]
THEIRS = [
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]


def differences(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "differences.json").read_text())
    assert max(found.values()) <= TOLERANCE, found
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_runtime_runs_our_schedules(ranks: int, tmp_path: Path) -> None:
    assert launch(ours_in_torch, ranks, args=(ONE_WAY, 2 * ranks, tmp_path)) == 0
    assert len(differences(tmp_path)) == 2 * len(ONE_WAY)


@pytest.mark.parametrize("ranks", [2, 4])
def test_our_runtime_runs_torchs_schedules(ranks: int, tmp_path: Path) -> None:
    assert launch(torchs_in_ours, ranks, args=(THEIRS, 2 * ranks, tmp_path)) == 0
    assert len(differences(tmp_path)) == 2 * len(THEIRS)
