"""Ops draw as on the CPU, and autocast as on CUDA."""

import pytest
import torch
from torch.nn import functional as F

DEVICE = "standin"


def test_each_device_has_a_default_generator() -> None:
    torch.manual_seed(5)
    a, b = (torch.rand(3, device=f"standin:{i}").cpu() for i in range(2))
    torch.get_device_module(DEVICE).default_generators[1].manual_seed(5)
    assert torch.equal(a, b) and torch.equal(torch.rand(3, device="standin:1").cpu(), b)


def test_autocast_has_cudas_lists() -> None:
    """Of each of the lists of ATen one op, and `relu`, which is in none."""
    x = torch.rand(6, 6, device=DEVICE)
    low = x.bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert {(x @ x.T).dtype, torch.relu(low).dtype} == {torch.bfloat16}
        wide = (torch.softmax(low, -1), low.sum(), torch.norm(low), torch.addcmul(x, low, low))
        assert {each.dtype for each in wide} == {torch.float32}
        with pytest.raises(RuntimeError, match="binary_cross_entropy"):
            F.binary_cross_entropy(x, x)


def test_tensors_elsewhere_are_refused() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device|on the device"):
        x @ torch.ones(2, 2)
    assert (x * torch.tensor(3.0)).sum().item() == 12  # a number may be anywhere
