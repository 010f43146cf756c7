"""Offloading into memory frees none: said once, by the first rank that offloads."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan, StagePlan
from pipeloom.runtime.offload.open_tier import open_tier

STAGES = tuple(StagePlan(ops=(name,)) for name in "abc")
PLAN = Plan(
    graph="",
    planner="",
    stages=STAGES,
    placement=(0, 1, 2),
    schedule="1f1b",
    schedule_rows=(),
    microbatches=1,
    memory=MemoryPolicy(stages=({}, {"relu": "offload"}, {"relu": "offload"})),
)


def said(rank: int, folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tier = open_tier(PLAN, (rank,), torch.device("cpu"), folder, rank)
    if tier is not None:
        tier.close()
    return [str(warning.message) for warning in seen]


def test_a_folder_in_memory_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.runtime.offload.file_tier.lies_in_memory", lambda folder: True)
    assert [said(rank, tmp_path) for rank in range(3)] == [
        [],
        [
            f"offloaded residuals go to {tmp_path}, which lies in memory (tmpfs): offloading frees none "
            "there; "
            "name a folder on a disk with --offload-dir (Options.offload_dir)"
        ],
        [],
    ]


def test_a_folder_on_a_disk_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.runtime.offload.file_tier.lies_in_memory", lambda folder: False)
    assert not any(said(rank, tmp_path) for rank in range(3))
