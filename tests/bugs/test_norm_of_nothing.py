"""A rank without a gradient gave its share of the norm on the CPU, where no sum over GPUs can take it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeloom.runtime.weights import Weights


@pytest.mark.parametrize("params", [{}, {"frozen": nn.Parameter(torch.zeros(3, device="meta"), False)}])
def test_nothing_is_zero_on_the_device_of_the_rank(params: dict[str, nn.Parameter]) -> None:
    weights = Weights(params, {}, None, device="meta")
    found = weights.norm_squares(params)
    assert found.device.type == "meta" and found.shape == () and found.dtype == torch.float64
