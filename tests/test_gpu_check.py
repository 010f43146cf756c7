"""bench/gpu_check.py on the CPU: the same code as on a GPU, with a tiny stage whose residuals go to files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu_check import SIZES, TOLERANCE, Setup

from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link


def cluster() -> Cluster:
    """Copies are planned to be faster than a busy disk: where they are not, the rank waits."""
    link = Link(bandwidth_bytes_per_s=1e10)
    one = cpu_cluster(1)
    device = replace(one.devices[0], host_link=link, host_link_back=link, host_memory_bytes=1 << 30)
    return replace(one, devices=(device,))


@pytest.mark.slow
def test_policies_run_as_planned(tmp_path: Path) -> None:
    size = replace(SIZES["cpu"], layers=1, length=32)
    setup = Setup(size, "cpu", None, cluster(), budget_s=0.5)
    rows = list(gpu_check.compare(setup, (0.6,), 1, tmp_path))
    assert [row["policy"] for row in rows] == ["keep", "recompute", "offload", "both", "keep again"]
    assert gpu_check.judged(rows) == []
    kept, again, away, both, _ = rows
    for row in rows:
        peaks = row["peak_bytes"]
        assert peaks["ledger"] <= (1 + TOLERANCE) * peaks["model"] <= (1 + 2 * TOLERANCE) * row["cap_bytes"]
        assert row["gradient_difference"] == 0
        assert {"F", "B"} <= row["action_s"]["measured"].keys() == row["action_s"]["profile"].keys()
    for row in (again, away, both):
        assert row["peak_bytes"]["ledger"] < kept["peak_bytes"]["ledger"]
    assert again["recomputed"] and again["hidden"] is None
    assert away["offloaded"] and away["copies_s"] > 0 and away["hidden"] is not None
    assert away["host_bytes"]["ledger"] > 0


def test_a_run_that_fails_and_gradients_that_differ_are_told() -> None:
    good = {"policy": "keep again", "cap_share": 1.0, "gradient_difference": 1e-8}
    bad = {"policy": "both", "cap_share": 0.5, "gradient_difference": 1e-3}
    failed = {"policy": "offload", "cap_share_asked": 0.4, "failed": "no room"}
    assert gpu_check.judged([good, bad, failed]) == [
        "offload at 0.4 failed: no room",
        "gradients with both at 0.50 of the kept peak differ by 1.0e-03 of their norm, more than 1.0e-06",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the sentence says is missing")
def test_without_a_device_a_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 1
    assert capsys.readouterr().err.startswith("gpu_check: this Python's torch sees no CUDA device")
