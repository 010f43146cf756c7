"""On an accelerator: the same numbers as eager PyTorch, and memory as predicted."""

import gc

import products
import pytest
import runs
import torch
from torch import Tensor

from pipeloom import Options, Pipeline
from pipeloom.run_options import named_device

MICROBATCHES, ROWS, WIDTH = 4, 16, 512
JOB = products.job(WIDTH)
DATA = JOB.batch(1, MICROBATCHES * ROWS)
DEVICE = named_device("auto")


def opened() -> Pipeline:
    """Two stages on one rank."""
    how = {"microbatches": MICROBATCHES, "microbatch_size": ROWS, "schedule": "gpipe", "placement": (0, 0)}
    return Pipeline(JOB, runs.even_plan(JOB, 2, **how), options=Options(device=DEVICE))


def eager() -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = JOB.model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    data = {name: t.to(DEVICE) for name, t in DATA.items()}
    for x, y in zip(data["x"].split(ROWS), data["y"].split(ROWS), strict=True):
        loss = model(x, y) / MICROBATCHES
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total, {name: p.detach().cpu() for name, p in model.named_parameters()}


def test_a_step_equals_eager_pytorch_in_the_time_of_the_device() -> None:
    with opened() as pipeline:
        loss = pipeline.step(DATA)
        params = {name: p.detach().cpu() for name, p in pipeline.weights.params.items()}
        timeline = pipeline.measured()
    expected, updated = eager()
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(params, updated, rtol=1e-5, atol=1e-6)
    assert 0 < timeline.totals.busy_s[0] <= timeline.step_s


def test_the_ledger_agrees_with_the_allocator_and_a_pipeline_leaves_nothing() -> None:
    with opened() as pipeline:
        pipeline.step(DATA)  # libraries keep workspaces
    del pipeline
    gc.collect()
    before = torch.accelerator.memory_allocated()
    with opened() as pipeline:
        pipeline.step(DATA)
        torch.accelerator.reset_peak_memory_stats()
        pipeline.ledger.peak = pipeline.ledger.total
        pipeline.step(DATA)
        held = torch.accelerator.max_memory_allocated() - before
        # cuBLAS keeps a workspace that belongs to no tensor of ours
        assert pipeline.ledger.peak == pytest.approx(held, rel=0.03, abs=64 * 2**20)
    del pipeline
    assert torch.accelerator.memory_allocated() == before
