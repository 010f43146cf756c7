"""Kept, recomputed and offloaded residuals: the same bits, and memory as foreseen. Random mixes:
`test_random_programs.py`."""

from dataclasses import replace

import nets
import pytest
import torch
from ledgers import sends_are_through_at_once
from odd.control_flow import JOBS
from runs import assert_same_bits, capture_of, each_rank, even, pipelined, plan_for

from pipeloom import Job, Pipeline
from pipeloom.ir.errors import PlanError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.ir.plan import Plan
from pipeloom.runtime.file_tier import FileCopy, FileTier
from pipeloom.tracer.stage.functions import Tensors
from pipeloom.tracer.stage.trace import stage_residuals


def all_away(job: Job, stages: int, *, autocast: torch.dtype | None = None, **how: object) -> Plan:
    """Every second residual offloaded, every other one recomputed where it can be."""
    captured = capture_of(job, 2, autocast=autocast)
    plan = plan_for(captured, even(captured.graph, stages), microbatches=4, **how)
    policy = tuple(
        {
            name: "offload" if place % 2 or residual.obstacle else "recompute"
            for place, (name, residual) in enumerate(
                stage_residuals(captured, plan.stage_graph(captured.graph), s).items()
            )
        }
        for s in range(stages)
    )
    return replace(plan, memory=MemoryPolicy(stages=policy))


@pytest.mark.slow
def test_autocast() -> None:
    job = nets.job("gpt")
    plan = all_away(job, 2, autocast=torch.bfloat16)
    batches = [job.batch(1, 8)]
    how = {"autocast": torch.bfloat16, "clip_norm": 0.5}
    expected = pipelined(job, replace(plan, memory=MemoryPolicy()), batches, **how)
    assert_same_bits(pipelined(job, plan, batches, **how), expected)


def test_a_model_cut_between_modules_is_refused() -> None:
    job = JOBS["branch in blocks"]
    captured = capture_of(job)
    assert captured.cut is not None
    plan = plan_for(captured, {op.name: 0 for op in captured.graph.ops}, microbatches=1)
    offloading = replace(plan, memory=MemoryPolicy(stages=({"saved.0": "offload"},)))
    with pytest.raises(PlanError, match="saved.0"):
        Pipeline(job, offloading)


@pytest.mark.sampled("gpt-gpipe")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["gpt", *nets.FAMILIES])
@sends_are_through_at_once()
def test_the_peak_is_as_simulated(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = nets.job(name)
    plan = all_away(job, 2, schedule=schedule)
    leaving, coming = FileTier.offload, FileCopy.reload

    def leave_at_once(self: FileTier, action: str, residuals: Tensors) -> FileCopy:
        copy = leaving(self, action, residuals)
        copy.away.result()
        return copy

    def come_at_once(copy: FileCopy) -> None:
        coming(copy)
        copy.back.result()

    def work(pipeline: Pipeline) -> None:
        for seed in range(2):
            pipeline.step(job.batch(seed, 8))
        rank, ledger = pipeline.rank, pipeline.ledger
        measured, expected = pipeline.measured(), pipeline.expected
        assert expected.peak_bytes(rank, "host") == measured.peak_bytes(rank, "host") == ledger.host_peak
        assert measured.peak_bytes(rank) == ledger.peak
        # The convnet's outputs are large beside its peak, and one is simulated to be on its way still.
        above = 0.08 if (name, schedule) == ("convnet", "1f1b") else 0.03
        assert 0.97 * ledger.peak <= expected.peak_bytes(rank) <= (1 + above) * ledger.peak

    monkeypatch.setattr(FileTier, "offload", leave_at_once)
    monkeypatch.setattr(FileCopy, "reload", come_at_once)
    each_rank(job, plan, work)
