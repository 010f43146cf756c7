"""bench/gpu_check.py runs, so that it does not fail for the first time on a rented machine."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_check
import gpu_check_rank
import processes
import pytest
import standin

SETUP = gpu_check.Setup(standin.NAME, gpu_check.SMALL)


def test_numbers_are_those_of_torchs_autocast_on_the_device() -> None:
    findings = gpu_check.check(SETUP, ["numbers"])
    assert [(f.what, f.found) for f in findings] == [
        ("float32: losses against plain PyTorch", 0.0),
        ("bfloat16: losses against plain PyTorch", 0.0),
    ]


def test_peaks_are_the_devices() -> None:
    findings = gpu_check.check(SETUP, ["memory"])
    assert len(findings) == 10 and not [f for f in findings if f.problem]


@pytest.mark.parametrize(("phase", "count"), [("host", 3), ("forecast", 2)])
def test_what_depends_on_speed_is_measured(phase: str, count: int) -> None:
    assert len(gpu_check.check(SETUP, [phase])) == count


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_two_ranks_train_as_one(schedule: str) -> None:
    script = Path(gpu_check_rank.__file__)
    ends = processes.ends_of(*processes.start_ranks(2, script, schedule, env={"STANDIN": "1"}))
    assert [status for status, _, _ in ends] == [0, 0], ends
    found = [json.loads(said) for _, said, _ in ends]
    with SETUP.pipeline(SETUP.plan()) as pipeline:
        expected = [pipeline.step(SETUP.batch(seed)) for seed in range(gpu_check.STEPS)]
    assert found[0]["losses"] == found[1]["losses"] == pytest.approx(expected, rel=1e-6)
