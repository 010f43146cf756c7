"""Ops draw as on the CPU, and autocast as on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

DEVICE = "standin"


def test_results_grow_in_place() -> None:
    x = torch.arange(6.0, device=DEVICE)
    out = torch.empty(0, device=DEVICE)
    torch.add(x, x, out=out)
    assert out.cpu().tolist() == [0, 2, 4, 6, 8, 10]
    torch.nonzero(x > 3, out=(places := torch.empty(0, dtype=torch.long, device=DEVICE)))
    assert places.cpu().tolist() == [[4], [5]]
    x.resize_(8)
    assert x[:6].cpu().tolist() == [0, 1, 2, 3, 4, 5] and x[6:].isnan().all().item()


def test_generators_are_reproducible() -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    state = generator.get_state()
    first, second = (torch.randn(5, device=DEVICE, generator=generator).cpu() for _ in range(2))
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(torch.randn(5, device=DEVICE, generator=generator).cpu(), first)
    assert torch.equal(torch.randn(5, generator=torch.Generator().manual_seed(3)), first)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(5, device=DEVICE, generator=torch.Generator())


def test_each_device_has_a_default_generator() -> None:
    torch.manual_seed(5)
    a, b = (torch.rand(3, device=f"standin:{i}").cpu() for i in range(2))
    torch.get_device_module(DEVICE).default_generators[1].manual_seed(5)
    assert torch.equal(a, b) and torch.equal(torch.rand(3, device="standin:1").cpu(), b)


AUTOCAST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "mm": (lambda x, low: x @ x.T, torch.bfloat16),
    "linear": (lambda x, low: F.linear(x, x), torch.bfloat16),
    "softmax": (lambda x, low: torch.softmax(low, -1), torch.float32),
    "layer_norm": (lambda x, low: F.layer_norm(low, (6,)), torch.float32),
    "pow": (lambda x, low: low.pow(2), torch.float32),
    "rsqrt": (lambda x, low: torch.rsqrt(low), torch.float32),
    "sum": (lambda x, low: low.sum(), torch.float32),
    "norm": (lambda x, low: torch.norm(low), torch.float32),
    "mse_loss": (lambda x, low: F.mse_loss(low, low), torch.float32),
    "mean": (lambda x, low: low.mean(), torch.bfloat16),
    "relu": (lambda x, low: torch.relu(low), torch.bfloat16),
    "addcmul": (lambda x, low: torch.addcmul(x, low, low), torch.float32),
}


@pytest.mark.parametrize("op", AUTOCAST)
def test_autocast_has_cudas_lists(op: str) -> None:
    call, expected = AUTOCAST[op]
    x = torch.rand(6, 6, device=DEVICE)
    low = x.bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert call(x, low).dtype == expected
        with pytest.raises(RuntimeError, match="binary_cross_entropy"):
            F.binary_cross_entropy(x, x)


def test_tensors_elsewhere_are_refused() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device|on the device"):
        x @ torch.ones(2, 2)
    assert (x * torch.tensor(3.0)).sum().item() == 12  # a number may be anywhere
