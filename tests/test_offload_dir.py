"""Planning for this machine's CPU with a folder to offload to; links that are slow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from deep import ROWS, TANH

from pipeloom import Options, Pipeline, plan, simulate
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.cluster import Cluster, Link, MiB
from pipeloom.ir.errors import ConfigError, InfeasibleError, PlanError
from pipeloom.ir.plan import Plan
from pipeloom.ir.text import parse_bytes
from pipeloom.machine import disk_speed, with_files
from pipeloom.planner.planners import make_plan
from pipeloom.planner.request import PlanOptions
from pipeloom.planning import make_request
from pipeloom.profiler.host_copies import file_tier
from pipeloom.profiler.roofline import roofline
from pipeloom.runtime.file_tier import FileTier

MICROBATCHES = 8
Disk = Callable[[float], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """As fast as it is said to be, however fast it is: what is offloaded at all depends on that."""

    def take(bytes_per_s: float) -> None:
        link = Link(bandwidth_bytes_per_s=bytes_per_s)
        monkeypatch.setattr("pipeloom.profiler.host_copies.file_tier", lambda directory: (link, link, []))

    return take


def planner(ranks: int) -> Callable[..., Plan]:
    captured = runs.capture_of(TANH, ROWS)
    how = {"microbatches": MICROBATCHES, "microbatch_size": ROWS, "schedule": "gpipe", "captured": captured}
    return partial(plan, TANH, ranks=ranks, **how)


def test_what_does_not_fit_is_offloaded_there(tmp_path: Path, disk: Disk) -> None:
    disk(1e12)
    folder, make = tmp_path / "not" / "there yet", planner(1)
    cap = round(0.8 * make().peaks[0])
    made = make(memory=cap, offload_dir=folder, treatments=("offload",))
    assert made.memory.treated(0, "offload") and made.peaks[0] <= cap
    with Pipeline(TANH, made, options=Options(offload_dir=folder)) as pipeline:
        for step in range(2):
            pipeline.step(TANH.batch(step, 8 * ROWS))
        assert pipeline.ledger.peak <= cap and pipeline.ledger.host_peak > 0
    assert list(folder.iterdir()) == []


def test_by_default_residuals_may_be_made_again_or_offloaded(tmp_path: Path, disk: Disk) -> None:
    disk(1e12)
    request = partial(make_request, ranks=2, offload_dir=tmp_path)
    assert request().options.treatments == ("recompute", "offload")
    assert request(planner="equal").options.allowed is None
    assert request(treatments=()).options.treatments == ()


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
    with pytest.raises(ConfigError, match="a cluster was given, and .* to offload to on this machine"):
        plan(TANH, ranks=2, microbatch_size=ROWS, cluster="2 x a100-40", offload_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot offload to .*file"):
        with_files(cpu_cluster(1), tmp_path / "file" / "folder")
    with pytest.raises(PlanError, match="--offload-dir"):
        planner(1)(treatments=("offload",))


@pytest.mark.slow
def test_a_slow_link_costs_time_and_the_smallest_cap_that_is_named_is_one(tmp_path: Path, disk: Disk) -> None:
    disk(1e6)  # a copy takes far longer than a forward
    make = planner(2)
    free, away = make(), partial(make, offload_dir=tmp_path, treatments=("offload",))
    capped = away(memory=round(0.6 * max(free.peaks)))
    assert all(peak <= cap for peak, cap in zip(capped.peaks, capped.caps, strict=True))
    assert capped.predicted_step_s > 2 * free.predicted_step_s
    with pytest.raises(InfeasibleError) as caught:
        away(memory=round(0.2 * max(free.peaks)))
    named = re.search(r"at least ([0-9.]+ [KM]iB)", str(caught.value.hint))
    assert named is not None
    least = away(memory=parse_bytes(named[1].replace(" ", "")))
    assert all(peak <= cap for peak, cap in zip(least.peaks, least.caps, strict=True))


def linked(bytes_per_s: float, cap: int) -> Cluster:
    """Two processes, each with a link of its own to the host."""
    cluster = cpu_cluster(2)
    link = Link(bandwidth_bytes_per_s=bytes_per_s)
    devices = (replace(one, host_link=link, host_link_back=link, memory_bytes=cap) for one in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def trained(made: Plan, folder: Path) -> list[tuple[dict[str, torch.Tensor], int]]:
    """Each rank's gradients of the second step, and the peak of its ledger."""

    def work(pipeline: Pipeline) -> tuple[dict[str, torch.Tensor], int]:
        for seed in (1, 2):
            pipeline.step(TANH.batch(seed, ROWS * MICROBATCHES))
        return dict(pipeline.weights.last_gradients), pipeline.ledger.peak

    return runs.each_rank(TANH, made, work, keep_gradients=True, offload_dir=folder)


def throttled(copy: Any) -> Any:
    """What copies, only slower."""

    def slowly(tier: FileTier, what: Any) -> None:
        time.sleep(0.005)
        copy(tier, what)

    return slowly


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "share"), [("gpipe", 0.5), ("gpipe", 0.7), ("po_f", 0.9)])
def test_a_link_throttled_to_a_tenth_costs_time_and_nothing_else(
    schedule: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its cap all the same, planned for a link ten times as fast, simulated and run."""
    graph = runs.graph_of(TANH, ROWS)

    def planned(name: str, cap: int, treatments: tuple[Any, ...]) -> tuple[Plan, Any]:
        cluster = linked(1e8, cap)
        costs, how = roofline(graph, cluster.devices[0]), {"ranks": 2, "microbatches": MICROBATCHES}
        options = PlanOptions(treatments=treatments)
        made = make_plan(graph, costs, cluster, schedule=name, options=options, **how)
        return replace(made, microbatch_size=ROWS), costs

    free, _ = planned(schedule.replace("_f", ""), 1 << 30, ())
    cap = round(share * max(free.peaks))
    # All that leaves with po_f would take longer than it computes, so that nothing did: some is made again.
    made, costs = planned(schedule, cap, ("offload",) if schedule == "gpipe" else ("recompute", "offload"))
    assert any(stage.offloaded_bytes for stage in made.stages)
    fast, slow = (simulate(made, graph, costs, linked(rate, cap)) for rate in (1e8, 1e7))
    assert slow.step_s > 2 * fast.step_s
    assert all(step.peak_bytes(rank) <= cap for step in (fast, slow) for rank in range(2))

    expected = trained(made, tmp_path)
    for real in (FileTier._write, FileTier._read_back):
        monkeypatch.setattr(FileTier, real.__name__, throttled(real))
    for (gradients, peak), (wanted, before) in zip(trained(made, tmp_path), expected, strict=True):
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
        assert max(peak, before) <= cap
