"""Residuals that leave a GPU for pinned memory and come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from runs import capture_of, even, plan_for

from pipeloom import Options, Pipeline
from pipeloom.ir.memory import MemoryPolicy, Treatment
from pipeloom.ir.stages import cut
from pipeloom.runtime.cuda_tier import CudaTier
from pipeloom.tracer.functions import stage_residuals
from pipeloom.tracer.split import Slot

pytestmark = pytest.mark.gpu


def test_everything_comes_back_as_it_was() -> None:
    tier = CudaTier(0)
    for _ in range(3):
        given = {
            Slot("made", "dense"): torch.randn(1000, 33, device="cuda"),
            Slot("made", "transposed"): torch.randn(20, 30, device="cuda").t(),
            Slot("made", "half"): torch.randn(7, device="cuda").bfloat16(),
        }
        before = {slot: t.clone(memory_format=torch.preserve_format) for slot, t in given.items()}
        trip = tier.leave("0OFFLOAD0", given)
        torch.randn(2000, 2000, device="cuda").mm(torch.randn(2000, 2000, device="cuda"))
        tier.come_back(trip)
        found = tier.arrived(trip, lambda: None)
        assert not given and tier.held_bytes == 0
        for slot, tensor in before.items():
            assert torch.equal(found[slot], tensor) and found[slot].stride() == tensor.stride()
    torch.cuda.synchronize()
    assert sum(len(buffers) for buffers in tier._free.values()) <= 3
    tier.close()


@pytest.mark.parametrize("treatment", ["offload", "recompute"])
def test_gradients_and_memory(treatment: Treatment) -> None:
    """Many micro-batches in flight: the same numbers, and less memory."""
    job = zoo.job("gpt")
    captured = capture_of(job)
    stage_of = even(captured.graph, 1)
    stages = cut(captured.graph, stage_of)
    found = stage_residuals(captured, stages, 0, device="cuda")
    policy = MemoryPolicy(stages=({n: treatment for n, r in found.items() if not r.obstacle},))
    plan = plan_for(captured, stage_of, microbatches=8, schedule="gpipe")
    results, peaks = [], []
    for memory in (MemoryPolicy(), policy):
        options = Options(device="cuda", keep_gradients=True)
        with Pipeline(job, replace(plan, memory=memory), options=options) as pipeline:
            losses = [pipeline.step(job.batch(seed, 16)) for seed in range(2)]
            results.append((losses, dict(pipeline.weights.last_gradients)))
            peaks.append(pipeline.ledger.at_peak["residuals"])
            streams = {event.stream for event in pipeline.measured().events}
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for name, gradient in results[0][1].items():
        assert torch.allclose(results[1][1][name], gradient, rtol=1e-5, atol=1e-7), name
    assert peaks[1] < peaks[0]
    assert ({"d2h", "h2d"} <= streams) == (treatment == "offload")
