"""Residuals that leave an accelerator, or are made again: the same numbers, and memory as counted."""

import gc
from dataclasses import replace

import products
import pytest
import runs
import torch

from pipeloom import Options, Pipeline, Plan
from pipeloom.ir.memory_policy import MemoryPolicy, Treatment
from pipeloom.ir.timeline import Event
from pipeloom.run_options import named_device
from pipeloom.runtime.pinned_tier import CHUNK, PinnedTier

MICROBATCHES, ROWS, WIDTH, STEPS = 6, 8192, 1024, 10
"""32 MiB per tensor: copies take longer than the products beside them, so that a missing wait is seen."""

JOB = products.job(WIDTH)
DEVICE = named_device("auto")


def plan_of(treatments: tuple[Treatment, ...]) -> Plan:
    """One stage, all micro-batches in flight; residuals get the treatments in turn."""
    plan = runs.even_plan(JOB, 1, microbatches=MICROBATCHES, microbatch_size=ROWS, schedule="gpipe")
    return runs.treated_plan(JOB, plan, *treatments)


@pytest.mark.parametrize("treatments", [("offload",), ("recompute",), ("offload", "recompute", "keep")])
def test_many_steps_equal_those_with_everything_kept(treatments: tuple[Treatment, ...]) -> None:
    """Also with copies that follow each other closely: memory used too early would show in the losses."""
    found = []
    plan = plan_of(treatments)
    for own in (replace(plan, memory=MemoryPolicy()), plan):
        with Pipeline(JOB, own, options=Options(device=DEVICE)) as pipeline:
            losses = [pipeline.step(JOB.batch(seed, MICROBATCHES * ROWS)) for seed in range(STEPS)]
            found.append((losses, {n: p.detach().cpu() for n, p in pipeline.weights.params.items()}))
    (expected, params), (losses, ours) = found
    assert losses == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(ours, params, rtol=1e-5, atol=1e-6)


def test_memory_falls_as_the_ledger_says() -> None:
    peaks = {}
    gc.collect()
    before = torch.accelerator.memory_allocated()
    plan = plan_of(("offload",))
    for name, own in (("keep", replace(plan, memory=MemoryPolicy())), ("offload", plan)):
        with Pipeline(JOB, own, options=Options(device=DEVICE)) as pipeline:
            data = JOB.batch(1, MICROBATCHES * ROWS)
            pipeline.step(data)
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            pipeline.ledger.peak = pipeline.ledger.total
            pipeline.step(data)
            # Active bytes count memory that a copy still reads, allocated bytes do not.
            held = torch.accelerator.memory_stats()["active_bytes.all.peak"] - before
            peaks[name] = held
            assert pipeline.ledger.peak == pytest.approx(held, rel=0.03, abs=64 * 2**20)
            if name == "offload":
                assert isinstance(pipeline.tier, PinnedTier)
                most = pipeline.ledger.host_peak + MICROBATCHES * CHUNK
                assert pipeline.ledger.host_peak <= len(pipeline.tier._idle_chunks) * CHUNK <= most
    assert peaks["offload"] < 0.8 * peaks["keep"]


def test_copies_run_beside_the_computation() -> None:
    with Pipeline(JOB, plan_of(("offload", "keep", "keep")), options=Options(device=DEVICE)) as pipeline:
        for seed in range(2):
            pipeline.step(JOB.batch(seed, MICROBATCHES * ROWS))
        events = pipeline.measured().events
    away, back, computing = ([e for e in events if e.stream == s] for s in ("d2h", "h2d", "compute"))
    assert len(away) == len(back) == MICROBATCHES

    def beside(copy: Event) -> bool:
        return any(c.start_s < copy.end_s and copy.start_s < c.end_s for c in computing)

    assert sum(map(beside, away)) >= MICROBATCHES - 1 and any(map(beside, back))
