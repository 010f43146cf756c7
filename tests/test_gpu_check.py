"""bench/gpu_check.py where there is no accelerator. That it runs on one, tests/standin shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu_check import Finding


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has what the sentence says is missing"
)
def test_without_a_device_a_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 1
    assert capsys.readouterr().err.startswith("gpu_check: this Python's torch sees no accelerator")


def test_what_differs_is_told_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def numbers(setup: gpu_check.Setup) -> list[Finding]:
        return [Finding("losses", 0.5, "at most 0.1", "look at the casts"), Finding("waits", 1, "1")]

    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "numbers"])
    monkeypatch.setattr(gpu_check, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_check, "named_device", lambda name: "cuda")
    monkeypatch.setattr(gpu_check, "described", lambda device: {"date": "2026-01-01"})
    monkeypatch.setitem(gpu_check.PHASES, "numbers", numbers)
    assert gpu_check.main() == 1
    assert "losses is 0.5, expected at most 0.1: look at the casts" in capsys.readouterr().out
    written = json.loads((tmp_path / "results" / "gpu_check_cuda_2026-01-01.json").read_text())
    assert [finding["what"] for finding in written["findings"]] == ["losses", "waits"]
