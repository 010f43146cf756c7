"""Pipelines on the stand-in: the CPU's numbers to the bit, no race, one wait of the host per step. Each wait
that is taken out of the runtime is reported."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mutations
import processes
import products
import pytest
import runs
import standin
import torch
import zoo
from torch import Tensor

from pipeloom import Options, Pipeline, Plan
from pipeloom.ir.memory_policy import MemoryPolicy

MICROBATCHES, ROWS = 4, 16
JOB = products.job(64)
HERE = Path(__file__).parent

READS_ONCE = ["copy to the host batches.py"]
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
    job = zoo.with_dropout("gpt")
    plan = runs.even_plan(job, 1, microbatches=2, microbatch_size=2, schedule="gpipe")
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
    assert streams == {"compute", "recv", "d2h", "h2d"}
    del pipeline
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


TIER = [name for name, (where, *_) in mutations.MUTATIONS.items() if where.__name__ != "_Enqueued"]


@pytest.mark.parametrize("name", TIER)
def test_a_wait_that_the_tier_lacks_is_reported(name: str) -> None:
    expected = mutations.MUTATIONS[name][-1]
    with mutations.applied(name), standin.collecting() as found:
        train(plan_of("offload"), "standin", steps=2)
    reports = [f"{report.kind}: {report.text.partition(': ')[2]}" for report in found]
    if expected:
        assert any(re.search(expected, report) for report in reports), reports
    else:
        assert not reports


def two_ranks(device: str, mutation: str = "none") -> list[dict[str, Any]]:
    words = (HERE / "rank_of_two.py", device, mutation)
    env = {"PIPELOOM_COMPARE": "0", "STANDIN": "1"}
    ends = processes.ends_of(*processes.start_ranks(2, *words, env=env))
    for status, _, errors in ends:
        assert status == 0, errors
    return [json.loads(said.splitlines()[-1]) for _, said, _ in ends]


def test_two_ranks_equal_the_cpu_to_the_bit() -> None:
    for expected, found in zip(two_ranks("cpu"), two_ranks("standin"), strict=True):
        assert found.pop("waits") == READS_ONCE and not expected.pop("waits")
        assert found == expected and not found["reports"]


def test_a_transfer_that_is_not_waited_for_is_reported() -> None:
    for rank in two_ranks("standin", "a transfer is not waited for"):
        assert any(re.search("race: .* (recv|send) ", report) for report in rank["reports"]), rank["reports"]
