"""How many cores a process may use."""

import os
from pathlib import Path

import pytest

from pipeloom.profiler import measurement
from pipeloom.profiler.measurement import usable_cores

ALLOWED = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", ALLOWED), ("", ALLOWED), (None, ALLOWED)],
)
def test_a_quota_of_a_container_counts(
    quota: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(measurement, "QUOTA", tmp_path / "cpu.max")
    assert usable_cores() == expected
