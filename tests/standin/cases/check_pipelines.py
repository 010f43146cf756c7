"""Pipelines on the stand-in: the CPU's numbers to the bit, no race, one wait of the host per step. Each wait
that is taken out of the runtime is reported."""

import gc
from dataclasses import replace

import mutations
import nets
import products
import pytest
import runs
import standin
import torch
from torch import Tensor

from pipeloom import Options, Pipeline, Plan
from pipeloom.ir.errors import MemoryCapError
from pipeloom.ir.memory_policy import MemoryPolicy
from pipeloom.profiler.roofline import product_flops

MICROBATCHES, ROWS = 4, 16
JOB = products.job(64)
READS_ONCE = ["event.synchronize batches.py"]
"""Waits of the host that a step has: it reads its losses at its end."""


def plan_of(*treatments: str) -> Plan:
    """One stage, all micro-batches in flight; residuals get the treatments in turn."""
    plan = runs.even_plan(JOB, 1, microbatches=MICROBATCHES, microbatch_size=ROWS, schedule="gpipe")
    return runs.treated_plan(JOB, plan, *treatments)


def batch(seed: int) -> dict[str, Tensor]:
    return JOB.batch(seed, MICROBATCHES * ROWS)


def train(plan: Plan, device: str, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    with Pipeline(JOB, plan, options=Options(device=device)) as pipeline:
        losses = [pipeline.step(batch(seed)) for seed in range(steps)]
        return losses, {n: p.detach().cpu() for n, p in pipeline.weights.params.items()}


@pytest.mark.parametrize("treatments", [("offload",), ("recompute",), ("offload", "recompute", "keep")])
def test_one_rank_equals_the_cpu_to_the_bit(treatments: tuple[str, ...]) -> None:
    plan = plan_of(*treatments)
    expected, params = train(replace(plan, memory=MemoryPolicy()), "cpu")
    losses, found = train(plan, "standin")
    assert losses == expected and all(torch.equal(found[name], t) for name, t in params.items())
    assert not standin.hidden_waits()


def test_attention_and_dropout_draw_and_compute_what_they_do_on_the_cpu() -> None:
    job = nets.with_dropout("gpt")
    plan = runs.even_plan(job, 1, microbatches=2, schedule="gpipe")
    plan = runs.treated_plan(job, plan, "offload", "recompute", "keep")
    losses = []
    for device in ("cpu", "standin"):
        with Pipeline(job, plan, options=Options(device=device, clip_norm=1.0)) as pipeline:
            losses.append([pipeline.step(job.batch(seed, 4)) for seed in range(2)])
    assert losses[0] == losses[1] and not standin.hidden_waits()


def test_a_step_waits_once_and_leaves_nothing() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    with Pipeline(JOB, plan_of("offload", "keep"), options=Options(device="standin")) as pipeline:
        for seed in range(3):
            with standin.counted_syncs() as waits:
                pipeline.step(batch(seed))
            if seed == 1:
                held = torch.accelerator.memory_allocated()
        assert [f"{w.text} {w.place.rpartition('/')[2].partition(':')[0]}" for w in waits] == READS_ONCE
        assert torch.accelerator.memory_allocated() == held
        streams = {event.stream for event in pipeline.measured().events}
        with standin.counted_syncs() as waits:
            pipeline.evaluate(batch(0))
        assert len(waits) == 1, waits
    assert streams == {"compute", "recv", "d2h", "h2d"}
    del pipeline  # what it held goes at once: it is in no cycle
    assert torch.accelerator.memory_allocated() == before


def test_a_report_has_the_share_of_the_devices_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipeline(JOB, plan_of("offload", "keep"), options=Options(device="standin")) as pipeline:
        pipeline.step(batch(0))
        assert pipeline.report.mfu is None
    monkeypatch.setattr(torch.standin, "get_device_name", lambda device=None: "NVIDIA H200")
    with Pipeline(JOB, plan_of("offload", "keep"), options=Options(device="standin")) as pipeline:
        pipeline.step(batch(0))
        flops = MICROBATCHES * product_flops(pipeline.captured.graph)
        assert flops and pipeline.report.mfu == flops / (67e12 * pipeline.report.step_s)


def test_a_cap_is_the_allocators_limit_too() -> None:
    """What no ledger counts, as what a user makes on the device, cannot pass it either."""
    plan, device = plan_of("offload", "keep"), torch.device("standin", 0)
    with Pipeline(JOB, plan, options=Options(device="standin")) as pipeline:
        pipeline.step(batch(0))
        cap = pipeline.ledger.peak
    del pipeline  # the limit is on top of what is held when the next one is made
    plan = replace(plan, caps=(cap,))
    with Pipeline(JOB, plan, options=Options(device="standin")) as pipeline:
        pipeline.step(batch(0))
        mine = torch.empty(cap // 4, dtype=torch.uint8, device=device)
        with pytest.raises(MemoryCapError, match="out of its device's memory"):
            pipeline.step(batch(1))
    assert mine.nbytes and torch.empty(2 * cap, dtype=torch.uint8, device=device).nbytes


@pytest.mark.parametrize("name", mutations.ONE_RANK)
def test_what_one_rank_lacks_is_reported(name: str) -> None:
    with mutations.applied(name), standin.collecting() as found:
        train(plan_of("offload"), "standin", steps=2)
    mutations.require(name, [f"{report.kind}: {report.text.partition(': ')[2]}" for report in found])
