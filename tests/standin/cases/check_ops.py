"""Ops draw as on the CPU, and autocast as on CUDA."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

DEVICE = "standin"


def test_each_device_has_a_default_generator() -> None:
    torch.manual_seed(5)
    a, b = (torch.rand(3, device=f"standin:{i}").cpu() for i in range(2))
    torch.get_device_module(DEVICE).default_generators[1].manual_seed(5)
    assert torch.equal(a, b) and torch.equal(torch.rand(3, device="standin:1").cpu(), b)


# Of each of the lists of ATen one op, and `relu`, which is in none.
AUTOCAST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "mm": (lambda x, low: x @ x.T, torch.bfloat16),
    "softmax": (lambda x, low: torch.softmax(low, -1), torch.float32),
    "sum": (lambda x, low: low.sum(), torch.float32),
    "norm": (lambda x, low: torch.norm(low), torch.float32),
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
