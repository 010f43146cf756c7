"""A cap that needs more copying than hides behind computing costs time; it is not refused."""

from __future__ import annotations

import re
import time
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
from pipeloom.ir.cluster import Cluster, Link
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.plan import Plan
from pipeloom.ir.text import parse_bytes
from pipeloom.planner.make_plan import make_plan
from pipeloom.planner.request import PlanOptions
from pipeloom.profiler.roofline import roofline
from pipeloom.runtime.offload.file_tier import FileTier
from pipeloom.runtime.transports.local_channel import LocalChannel

MICROBATCHES = 8


def test_a_slow_link_costs_time_and_the_smallest_cap_that_is_named_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Link(bandwidth_bytes_per_s=1e6)  # a copy takes far longer than a forward
    monkeypatch.setattr("pipeloom.profiler.host_copies.file_tier", lambda directory: (slow, slow, []))
    captured = runs.capture_of(TANH, ROWS)
    make = partial(
        plan, TANH, ranks=2, microbatches=8, microbatch_size=ROWS, schedule="gpipe", captured=captured
    )
    free = make()
    away = partial(make, offload_dir=tmp_path, treatments=("offload",))
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

    def work(rank: int, channel: LocalChannel) -> tuple[dict[str, torch.Tensor], int]:
        options = Options(keep_gradients=True, offload_dir=folder)
        with Pipeline(TANH, made, options=options, channel=channel) as pipeline:
            for seed in (1, 2):
                pipeline.step(TANH.batch(seed, ROWS * MICROBATCHES))
            return dict(pipeline.weights.last_gradients), pipeline.ledger.peak

    with runs.shared_captures():
        return runs.threads(2, work)


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
        costs = roofline(graph, cluster.devices[0])
        options = PlanOptions(treatments=treatments)
        made = make_plan(
            graph, costs, cluster, ranks=2, schedule=name, microbatches=MICROBATCHES, options=options
        )
        return replace(made, microbatch_size=ROWS), costs

    free, _ = planned(schedule.replace("_f", ""), 1 << 30, ())
    cap = round(share * max(free.peaks))
    # All that leaves with po_f would take longer than it computes, so that nothing did: some is made again.
    made, costs = planned(schedule, cap, ("offload",) if schedule == "gpipe" else ("recompute", "offload"))
    assert any(stage.offloaded_bytes for stage in made.stages)
    fast, slow = (simulate(made, graph, costs, linked(rate, cap)) for rate in (1e8, 1e7))
    assert slow.step_s > 2 * fast.step_s
    for rank in range(2):
        assert max(fast.peak_bytes(rank), slow.peak_bytes(rank)) <= cap

    expected = trained(made, tmp_path)
    for real in (FileTier._write, FileTier._read_back):
        monkeypatch.setattr(FileTier, real.__name__, throttled(real))
    for (gradients, peak), (wanted, before) in zip(trained(made, tmp_path), expected, strict=True):
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
        assert max(peak, before) <= cap
