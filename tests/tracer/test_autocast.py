"""`tracer.autocast`: CPU tensors are cast as CUDA's are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import nets
import pytest
import torch
from batches import normal
from runs import capture_of, even, plan_for
from torch import nn
from torch.nn import functional

from pipeloom import Job, Options, verify
from pipeloom.ir.graph import CAST
from pipeloom.ir.stages import cut
from pipeloom.tracer import autocast
from pipeloom.tracer.autocast import Autocast, autocast_region
from pipeloom.tracer.stage.trace import stage_residuals

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def listed(macro: str) -> set[str]:
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)(.*?[^\\])\n\n", text, re.DOTALL)
    assert body, f"PyTorch has no {macro} any more"
    return {m[1] + (f".{m[2]}" if m[2] else "") for m in re.finditer(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])}


def test_the_lists_are_those_of_pytorch() -> None:
    extra = {"cudnn_convolution", "cudnn_convolution_transpose"}  # registered beside the list
    norms = {"norm.Scalar", "norm.ScalarOpt_dim"}
    assert set(autocast.LOWER_PRECISION) - extra == listed("AT_FORALL_LOWER_PRECISION_FP")
    assert set(autocast.FLOAT32) - norms == listed("AT_FORALL_FP32")
    assert set(autocast.FLOAT32_RESULT) == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert set(autocast.WIDEST) == listed("AT_FORALL_PROMOTE")
    names = ("LOWER_PRECISION", "FLOAT32", "FLOAT32_RESULT", "WIDEST", "REFUSED")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert {f"aten::{op}" for name in names for op in getattr(autocast, name)} == set(registered)


x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
low = x.bfloat16()

CASES = {
    "linear": (lambda: functional.linear(x, x), torch.bfloat16),
    "layer_norm": (lambda: functional.layer_norm(low, (6,)), torch.float32),
    "rms_norm": (lambda: functional.rms_norm(low, (6,)), torch.float32),
    "softmax with a dtype": (lambda: torch.softmax(low, -1, dtype=torch.bfloat16), torch.bfloat16),
    "sum": (lambda: low.sum(), torch.float32),
    "mean": (lambda: low.mean(), torch.bfloat16),
    "mixed": (lambda: torch.addcmul(x, low, low), torch.float32),
    "cross entropy": (lambda: functional.cross_entropy(low, torch.zeros(4).long()), torch.float32),
    "square": (lambda: low.square(), torch.float32),
    "same padding": (lambda: functional.conv1d(x[None], x[:, :4, None], padding="same"), torch.bfloat16),
    "interpolated": (lambda: functional.interpolate(low[None, None], (2, 2), mode="bilinear"), torch.float32),
    "LSTM": (lambda: nn.LSTM(6, 6)(x)[0], torch.bfloat16),
    "float64": (lambda: x.double() @ x.double().T, torch.float64),
    "attention": (lambda: functional.scaled_dot_product_attention(*(x[None, None],) * 3), torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operation_has_the_dtype_that_it_has_on_a_gpu(case: str) -> None:
    call, dtype = CASES[case]
    with autocast_region(Autocast(torch.bfloat16, "cuda")):
        assert call().dtype == dtype


def test_what_the_cpu_casts_and_a_gpu_does_not_is_left_alone() -> None:
    spectrum = torch.fft.fft
    with autocast_region(Autocast(torch.bfloat16, "cpu")):
        spectrum(low)  # the CPU's lists cast it to float32
    with autocast_region(Autocast(torch.bfloat16, "cuda")), pytest.raises(RuntimeError, match="BFloat16"):
        spectrum(low)


def test_the_cpus_lists_are_back_afterwards() -> None:
    with autocast_region(Autocast(torch.bfloat16, "cuda")):
        pass
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(low, -1).dtype == torch.bfloat16


def test_gradients_flow_through_the_casts() -> None:
    weight = nn.Parameter(x.clone())
    with autocast_region(Autocast(torch.bfloat16, "cuda")):
        torch.softmax(low @ weight.T, -1).square().sum().backward()
    by_hand = nn.Parameter(x.clone())
    scores = low @ by_hand.bfloat16().T
    torch.softmax(scores, -1, dtype=torch.float32).float().square().sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, by_hand.grad)


def test_a_loss_that_loses_its_gradients_is_refused() -> None:
    with autocast_region(Autocast(torch.bfloat16, "cuda")), pytest.raises(RuntimeError, match="logits"):
        functional.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(x))


WIDE = Job(
    name="wide",
    model=lambda: nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.GELU()))),
    batch=normal(input=(16,)),
    loss=lambda output, batch: output.sum(),
)
"""Activations of far more numbers than its weights."""


def test_residuals_take_half_the_bytes_and_no_cast_of_a_weight_is_one() -> None:
    whole, halved = (residuals_of(WIDE, 256, autocast) for autocast in (None, torch.bfloat16))
    assert halved.pop("_to_copy") == 256 * 16 * 2  # of the batch
    assert halved == {name: size / 2 for name, size in whole.items()}


def residuals_of(job: Job, rows: int, autocast: torch.dtype | None) -> dict[str, int]:
    captured = capture_of(job, rows, autocast=autocast, device="cuda")
    casts_of_weights = {op.name for op in captured.graph.ops if op.target == CAST and op.params}
    residuals = stage_residuals(captured, cut(captured.graph, even(captured.graph, 1)), 0)
    assert not casts_of_weights & residuals.keys() and bool(casts_of_weights) == (autocast is not None)
    return {name: residual.bytes for name, residual in residuals.items()}


def same_padding() -> nn.Module:
    """A convolution that is made of two operations in no list."""
    return nn.Sequential(nn.Unflatten(1, (4, 4)), *(nn.Conv1d(4, 4, 3, padding="same") for _ in range(3)))


QUICK = {"wide": WIDE, "same padding": replace(WIDE, model=same_padding), "gpt": nets.job("gpt")}


OTHERS = [name for name in nets.NAMES if name not in (*QUICK, "counting")]
"""Of the families; that one mixes dtypes, which autocast refuses in plain PyTorch as well."""


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_pipeline_equals_one_process_under_a_gpus_autocast(name: str) -> None:
    """Where a bfloat16 gradient is the sum of several, a graph adds them in another order than autograd."""
    job = QUICK.get(name) or nets.job(name)
    captured = capture_of(job, 2, autocast=torch.bfloat16, device="cuda")
    plan = plan_for(captured, even(captured.graph, 2), microbatches=2)
    compared = verify(job, plan, options=Options(autocast=torch.bfloat16), captured=captured)
    assert compared.independent and compared.loss < 1e-6
    assert compared.worst < (1e-5 if name in QUICK else 1e-2), compared.verdict
