"""On an accelerator: the same numbers as eager PyTorch, and memory as predicted."""

import gc

import products
import pytest
import runs
import torch
from torch import Tensor

from pipeloom import Options, Pipeline, Plan
from pipeloom.run_options import named_device

MICROBATCHES, ROWS, WIDTH = 4, 16, 512
JOB = products.job(WIDTH)
DEVICE = named_device("auto")


def two_stages_on_one_rank() -> Plan:
    return runs.even_plan(
        JOB, 2, microbatches=MICROBATCHES, microbatch_size=ROWS, schedule="gpipe", placement=(0, 0)
    )


def eager() -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = JOB.model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    data = {name: t.to(DEVICE) for name, t in JOB.batch(1, MICROBATCHES * ROWS).items()}
    for x, y in zip(data["x"].split(ROWS), data["y"].split(ROWS), strict=True):
        loss = model(x, y) / MICROBATCHES
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total, {name: p.detach().cpu() for name, p in model.named_parameters()}


def test_a_step_equals_eager_pytorch() -> None:
    with Pipeline(JOB, two_stages_on_one_rank(), options=Options(device=DEVICE)) as pipeline:
        loss = pipeline.step(JOB.batch(1, MICROBATCHES * ROWS))
        params = {name: p.detach().cpu() for name, p in pipeline.weights.params.items()}
    expected, updated = eager()
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, tensor in updated.items():
        torch.testing.assert_close(params[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_ledger_agrees_with_the_allocator() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    with Pipeline(JOB, two_stages_on_one_rank(), options=Options(device=DEVICE)) as pipeline:
        data = JOB.batch(1, MICROBATCHES * ROWS)
        pipeline.step(data)
        torch.accelerator.reset_peak_memory_stats()
        pipeline.ledger.peak = pipeline.ledger.total
        pipeline.step(data)
        held = torch.accelerator.max_memory_allocated() - before
        # cuBLAS keeps a workspace that belongs to no tensor of ours
        assert pipeline.ledger.peak == pytest.approx(held, rel=0.03, abs=64 * 2**20)


def test_the_timeline_is_in_device_time() -> None:
    with Pipeline(JOB, two_stages_on_one_rank(), options=Options(device=DEVICE)) as pipeline:
        pipeline.step(JOB.batch(1, MICROBATCHES * ROWS))
        timeline = pipeline.measured()
    assert 0 < timeline.totals.busy_s[0] <= timeline.step_s


def test_a_pipeline_leaves_nothing() -> None:
    def train() -> None:
        with Pipeline(JOB, two_stages_on_one_rank(), options=Options(device=DEVICE)) as pipeline:
            pipeline.step(JOB.batch(1, MICROBATCHES * ROWS))

    train()  # libraries keep workspaces
    gc.collect()
    before = torch.accelerator.memory_allocated()
    train()
    assert torch.accelerator.memory_allocated() == before
