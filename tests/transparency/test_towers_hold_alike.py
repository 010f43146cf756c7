"""Equal towers side by side hold equally much, as simulated and as their ranks measure it."""

from __future__ import annotations

import branching
import pytest
from ledgers import sends_are_through_at_once
from runs import capture_of, plan_for, shared_captures, threads

from pipeloom import Options, Pipeline
from pipeloom.runtime.transports.local_channel import LocalChannel

MICROBATCHES = 6


def peaks_of(towers: int, schedule: str) -> list[tuple[int, int]]:
    """Per rank, towers first and then the join, the residuals at its peak: as simulated, and as measured."""
    job = branching.mmt(towers=towers, layers=1, width=8, heads=2, length=4, classes=3)
    captured = capture_of(job)
    stage_of = {
        op.name: int(op.module.split(".")[1]) if op.module.startswith("towers.") else towers
        for op in captured.graph.ops
        if not op.cheap
    }
    plan = plan_for(captured, stage_of, microbatches=MICROBATCHES, schedule=schedule)

    def work(rank: int, channel: LocalChannel) -> tuple[int, int]:
        with Pipeline(job, plan, options=Options(), channel=channel) as pipeline:
            for seed in range(2):
                pipeline.step(job.batch(seed, 2 * MICROBATCHES))
            return pipeline.expected.peaks[rank]["residuals"], pipeline.ledger.at_peak["residuals"]

    with sends_are_through_at_once(), shared_captures():
        return threads(towers + 1, work)


@pytest.mark.parametrize("schedule", ["zb_h1", pytest.param("1f1b", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "towers",
    [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)],
)
def test_equal_towers_hold_equally_much(towers: int, schedule: str) -> None:
    """Two micro-batches each, whatever their number: with as many towers as ranks it would grow with them."""
    *found, _ = peaks_of(towers, schedule)
    (simulated, measured), *others = found
    assert all(pair == (simulated, measured) for pair in others)
    assert simulated == measured > 0
    alone, _ = peaks_of(1, schedule)[0]
    assert simulated == alone
