"""Planning for this machine's CPU with a folder to offload to, without a cluster file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import runs
from deep import ROWS, TANH

from pipeloom import Options, Pipeline, plan
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.cluster import Link, MiB
from pipeloom.ir.errors import ConfigError, PlanError
from pipeloom.machine import disk_speed, with_files
from pipeloom.planning import make_request
from pipeloom.profiler.host_copies import file_tier


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the disk is does not matter here."""
    monkeypatch.setattr("pipeloom.profiler.host_copies.file_tier", partial(file_tier, file_bytes=MiB))


def test_what_does_not_fit_is_offloaded_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk is now: what is offloaded at all depends on that."""
    fast = Link(bandwidth_bytes_per_s=1e12)
    monkeypatch.setattr("pipeloom.profiler.host_copies.file_tier", lambda directory: (fast, fast, []))
    folder = tmp_path / "not" / "there yet"
    captured = runs.capture_of(TANH, ROWS)
    how = {
        "ranks": 1,
        "microbatches": 8,
        "microbatch_size": ROWS,
        "schedule": "gpipe",
        "captured": captured,
    }
    free = plan(TANH, **how)
    cap = round(0.8 * free.peaks[0])
    made = plan(TANH, **how, memory=cap, offload_dir=folder, treatments=("offload",))
    assert made.memory.treated(0, "offload") and made.peaks[0] <= cap
    with runs.shared_captures(), Pipeline(TANH, made, options=Options(offload_dir=folder)) as pipeline:
        for step in range(2):
            pipeline.step(TANH.batch(step, 8 * ROWS))
        assert pipeline.ledger.peak <= cap and pipeline.ledger.host_peak > 0
    assert list(folder.iterdir()) == []


def test_by_default_residuals_may_be_made_again_or_offloaded(tmp_path: Path) -> None:
    found = make_request(TANH, ranks=2, offload_dir=tmp_path)
    assert found.options.treatments == ("recompute", "offload")
    assert make_request(TANH, ranks=2, offload_dir=tmp_path, planner="equal").options.allowed is None
    assert make_request(TANH, ranks=2, offload_dir=tmp_path, treatments=()).options.treatments == ()


def test_processes_share_the_disk(tmp_path: Path) -> None:
    cluster, rows = with_files(cpu_cluster(3, memory=MiB), tmp_path)
    assert {row.name for row in rows} == {"host_link", "host_link_back"}
    for device in cluster.devices:
        assert device.switch == "disk" and device.host_link and device.host_link_back
        assert device.memory_bytes == MiB and device.host_memory_bytes > 0
    slower = min(device.host_link.bandwidth_bytes_per_s, device.host_link_back.bandwidth_bytes_per_s)
    assert cluster.switches["disk"].bandwidth_bytes_per_s == slower
    assert disk_speed(cluster).startswith("offloading: files, just measured, take ")
    assert disk_speed(cluster).endswith("which 3 processes share")


def test_a_cluster_says_itself_how_it_offloads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a cluster was given, and .* to offload to on this machine"):
        plan(TANH, ranks=2, microbatch_size=ROWS, cluster=find_cluster("2 x a100-40"), offload_dir=tmp_path)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot offload to .*file"):
        with_files(cpu_cluster(1), tmp_path / "file" / "folder")


def test_without_a_folder_the_hint_names_the_option() -> None:
    captured = runs.capture_of(TANH, ROWS)
    with pytest.raises(PlanError) as caught:
        plan(TANH, ranks=1, microbatch_size=ROWS, captured=captured, treatments=("offload",))
    assert "name a folder with --offload-dir" in (caught.value.hint or "")
