"""Planning for this machine's CPU with a folder to offload to; links that are slow."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import runs
from deep import ROWS, TANH
from refusals import refused

from pipeloom import Options, Pipeline, plan
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Link, MiB
from pipeloom.ir.errors import ConfigError, PlanError
from pipeloom.ir.plan import Plan
from pipeloom.machine import disk_speed, with_files
from pipeloom.planning import make_request
from pipeloom.profiler.host_copies import file_tier

MICROBATCHES = 8


def planner(ranks: int) -> Callable[..., Plan]:
    captured = runs.capture_of(TANH, ROWS)
    how = {"microbatches": MICROBATCHES, "microbatch_size": ROWS, "schedule": "gpipe", "captured": captured}
    return partial(plan, TANH, ranks=ranks, **how)


def test_what_does_not_fit_is_offloaded_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(bytes_per_s: float) -> None:
        """As fast as it is said to be, however fast it is: what is offloaded at all depends on that."""
        link = Link(bandwidth_bytes_per_s=bytes_per_s)
        monkeypatch.setattr("pipeloom.profiler.host_copies.file_tier", lambda directory: (link, link, []))

    disk(1e12)
    assert make_request(ranks=2, offload_dir=tmp_path).options.treatments == ("recompute", "offload")
    folder, make = tmp_path / "not" / "there yet", planner(1)
    cap = round(0.8 * make().peaks[0])
    made = make(memory=cap, offload_dir=folder, treatments=("offload",))
    assert made.memory.treated(0, "offload") and made.peaks[0] <= cap
    with Pipeline(TANH, made, options=Options(offload_dir=folder)) as pipeline:
        for step in range(2):
            pipeline.step(TANH.batch(step, 8 * ROWS))
        assert pipeline.ledger.peak <= cap and pipeline.ledger.host_peak > 0
    assert list(folder.iterdir()) == []
    disk(1e6)
    slow = make(memory=cap, offload_dir=folder, treatments=("offload",))
    assert slow.predicted_step_s > 2 * made.predicted_step_s and slow.peaks[0] <= cap


def test_processes_share_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.profiler.host_copies.file_tier", partial(file_tier, file_bytes=MiB))
    cluster, rows = with_files(cpu_cluster(3, memory=MiB), tmp_path)
    assert {row.name for row in rows} == {"host_link", "host_link_back"}
    for device in cluster.devices:
        assert device.switch == "disk" and device.host_link and device.host_link_back
        assert device.memory_bytes == MiB and device.host_memory_bytes > 0
    slower = min(device.host_link.bandwidth_bytes_per_s, device.host_link_back.bandwidth_bytes_per_s)
    assert cluster.switches["disk"].bandwidth_bytes_per_s == slower
    assert re.fullmatch(r"offloading: files, just measured, .* which 3 processes share", disk_speed(cluster))


def test_what_cannot_offload_says_so(tmp_path: Path) -> None:
    how = {"ranks": 2, "microbatch_size": ROWS, "cluster": "2 x a100-40", "offload_dir": tmp_path}
    assert "a cluster was given" in refused(ConfigError, plan, TANH, **how)
    (tmp_path / "file").write_text("")
    said = refused(ConfigError, with_files, cpu_cluster(1), tmp_path / "file" / "folder")
    assert f"cannot offload to {tmp_path / 'file'}" in said
    assert "--offload-dir" in refused(PlanError, planner(1), treatments=("offload",))
