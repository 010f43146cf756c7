"""Two ranks on accelerators give the numbers of two on the CPU, whatever the plan: messages, sums, shares of
optimizers and checkpoints by the backend of the device."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from two_rank_plans import CASES

from pipeloom.run_options import named_device

SCRIPT = Path(__file__).with_name("rank.py")


@cache
def trained(device: str) -> dict[tuple[str, int], dict[str, Any]]:
    """What each rank found, by plan and rank. All plans in the same processes, whose start takes longest."""
    env = {"PIPELOOM_COMPARE": "0"}
    with tempfile.TemporaryDirectory() as folder:
        ends = processes.ends_of(*processes.start_ranks(2, SCRIPT, device, folder, *CASES, env=env))
        files = {key: Path(folder, f"{key[0]} {key[1]}.pt") for key in _keys()}
        found = {key: torch.load(file) for key, file in files.items() if file.exists()}
    for key in _keys():
        found.setdefault(key, {"error": f"ended with {ends[key[1]][0]}: {ends[key[1]][2][-3000:]}"})
    return found


def _keys() -> list[tuple[str, int]]:
    return [(name, rank) for name in CASES for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_a_plan_gives_the_numbers_of_the_cpu(name: str) -> None:
    if (devices := torch.accelerator.device_count()) < 2:
        pytest.skip(f"two ranks need two devices: there is {devices}")
    device = named_device("auto")
    for rank in (0, 1):
        expected, there = trained("cpu")[name, rank], trained(device)[name, rank]
        assert "error" not in there, there["error"]
        for what in ("losses", "evaluated", "params", "loaded"):
            torch.testing.assert_close(there[what], expected[what], rtol=1e-4, atol=1e-5, check_dtype=False)
        ledger, requested, _ = there["peaks"]
        assert ledger == pytest.approx(requested, rel=0.03, abs=2**20)
