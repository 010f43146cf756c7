"""Schedules with copies to the host train as one process does, however slow the host is."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zoo
from deep import GELU
from hypothesis import Phase, given, settings, strategies as st
from programs import policies
from runs import (
    assert_same,
    capture_of,
    each_rank,
    even_plan,
    graph_of,
    pipelined,
    plain,
    residuals_of,
    treated_plan,
)

from pipeloom import Options, Pipeline
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.action import COPYING, OFFLOAD
from pipeloom.ir.cluster import Link
from pipeloom.ir.plan import Plan
from pipeloom.plan_request import CapturedModel, PlanRequest
from pipeloom.planner.request import PlanOptions
from pipeloom.profiler.roofline import roofline
from pipeloom.runtime.file_tier import FileTier
from pipeloom.runtime.launch import launch
from pipeloom.schedules import registry

ROWS = 64
CAP_SHARE = 0.7


JOB = zoo.in_double(replace(GELU, name="deep"))


def planned(name: str, ranks: int, chunks: int, microbatches: int) -> Plan:
    """All residuals of every stage leave where the schedule says so."""
    _, placement = registry.default_placement(name, ranks, chunks)
    how = {"microbatches": microbatches, "microbatch_size": ROWS, "schedule": name, "placement": placement}
    return treated_plan(JOB, even_plan(JOB, len(placement), **how), "offload")


def thinned(plan: Plan, data: st.DataObject) -> Plan:
    """The plan without the copies of some micro-batches."""
    rows = [line.split() for line in plan.schedule_rows]
    away = map(str, offloads(plan))
    dropped = {word for word in away if data.draw(st.booleans(), label=f"without {word}")}
    gone = {word.replace("OFFLOAD", kind) for word in dropped for kind in COPYING}
    lines = tuple(" ".join(word for word in row if word not in gone) for row in rows)
    return replace(plan, schedule_rows=lines)


def offloads(plan: Plan) -> list[Any]:
    return [action for row in plan.as_schedule.rows for action in row if action.kind == OFFLOAD]


@pytest.mark.slow
@settings(max_examples=3, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    st.sampled_from(["po", "gis", "zb_v"]),
    st.integers(2, 3),
    st.integers(2, 3),
    st.integers(1, 3),
    st.sampled_from([4, 7]),
    st.data(),
)
def test_partial_rows_and_mixed_treatments_equal_one_process(
    name: str, ranks: int, chunks: int, offload: int, microbatches: int, data: st.DataObject
) -> None:
    chunks = 2 if name == "zb_v" else chunks
    plan = planned(f"{name}:offload={min(offload, chunks)}", ranks, chunks, microbatches)
    residuals = [residuals_of(JOB, plan, stage) for stage in range(len(plan.stages))]
    plan = replace(thinned(plan, data), memory=data.draw(policies(residuals)))
    batches = [JOB.batch(seed, ROWS * microbatches) for seed in (1, 2)]
    found = pipelined(JOB, plan, batches)
    assert_same(found, plain(JOB, batches, microbatches), tolerance=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("1f1b:offload=1", 3, 1), ("po_f", 2, 2), ("po_h", 3, 2), ("gpipe:limit=3", 2, 1)],
)
def test_all_of_it_equals_one_process(name: str, ranks: int, chunks: int) -> None:
    plan = planned(name, ranks, chunks, 6)
    assert offloads(plan)
    batches = [JOB.batch(seed, ROWS * 6) for seed in (1, 2)]
    assert_same(pipelined(JOB, plan, batches), plain(JOB, batches, 6), tolerance=1e-12)


def die_within(where: str, plan: Plan, folder: Path) -> None:
    """Train; rank 1 is killed in the middle of its third copy."""
    move, copies = getattr(FileTier, where), []

    def broken_off(tier: FileTier, copy: Any) -> None:
        copies.append(copy)
        if tier._rank == 1 and len(copies) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        move(tier, copy)

    setattr(FileTier, where, broken_off)
    with Pipeline(JOB, plan, options=Options(offload_dir=folder)) as pipeline:
        pipeline.step(JOB.batch(1, ROWS * 6))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["_write", "_read_back"])
def test_a_rank_killed_in_the_middle_of_a_copy_leaves_nothing(where: str, tmp_path: Path) -> None:
    plan = planned("po_f", 2, 2, 6)
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    assert launch(partial(die_within, where), 2, args=(plan, tmp_path)) != 0
    assert not list(tmp_path.iterdir())
    assert (
        not shared.is_dir()
        or {p for p in shared.iterdir() if "torch" in p.name or "pipeloom" in p.name} <= before
    )


@pytest.mark.slow
def test_a_plan_of_pipeoffload_with_copies_trains_under_its_cap(tmp_path: Path) -> None:
    """The ledger refuses what would pass the cap; before, a rank whose copies were slower than planned was
    refused, though it only had to wait for them."""
    rows, microbatches, ranks = 256, 6, 2
    captured = capture_of(JOB, rows)
    link = Link(bandwidth_bytes_per_s=1e9)
    plain_device = cpu_cluster(ranks).devices[0]
    device = replace(plain_device, memory_bytes=1 << 40, host_link=link, host_link_back=link)
    model = CapturedModel(
        size=rows,
        graph=graph_of(JOB, rows),
        profiles={device.name: roofline(captured.graph, device)},
        captured=captured,
    )

    def made(memory: int, strategy: str) -> Plan:
        devices = (replace(device, memory_bytes=memory),) * ranks
        how = {"ranks": ranks, "microbatches": microbatches, "planner": strategy}
        options = PlanOptions(treatments=("offload",), **how)
        cluster = replace(cpu_cluster(ranks), devices=devices, within_node=link)
        return PlanRequest(cluster=cluster, options=options).plan(model)

    cap = int(CAP_SHARE * max(made(1 << 40, "exact").peaks))
    plan = made(cap, "pipeoffload")
    assert offloads(plan)
    assert plan.caps == (cap,) * ranks
    batches = [JOB.batch(seed, rows * microbatches) for seed in (1, 2)]
    expected = plain(JOB, batches, microbatches)

    def work(pipeline: Pipeline) -> tuple[int, int]:
        losses = [pipeline.step(each) for each in batches]
        assert losses == pytest.approx(expected.losses, rel=1e-12)
        return pipeline.ledger.peak, pipeline.ledger.host_peak

    found = each_rank(JOB, plan, work, offload_dir=tmp_path)
    assert max(peak for peak, _ in found) <= cap
    assert any(host > 0 for _, host in found)
