"""Clipping by a norm that stays on the device, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.runtime.weights import Weights, clip_factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [1.0, 1e-9, torch.inf, torch.nan])
def test_gradients_are_clipped_as_torch_does(dtype: torch.dtype, odd: float) -> None:
    """Where the norm was not a number, some gradients stayed numbers, and were not clipped."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "row": (4,), "number": ()}
    params = {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}
    weights = Weights(params, {}, lambda own: torch.optim.SGD(own, lr=0.1))
    for name, param in params.items():
        param.grad = torch.randn(shapes[name], generator=generator).to(dtype) * min(1.0, odd)
        param.grad.view(-1)[0] = odd
        weights.grads.add(name, param.grad)
    norm = weights.norm_squares(params).sqrt()
    weights.scale_gradients(clip_factor(norm, 0.5))
    torch.nn.utils.clip_grad_norm_(params.values(), 0.5)

    def close(name: str) -> Tensor:
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        return torch.isclose(weights.grads.sums[name], params[name].grad, rtol=tolerance, equal_nan=True)

    assert all(close(name).all() for name in params)


def test_gradients_within_the_limit_are_not_written_on_cpus() -> None:
    weights = Weights({"p": nn.Parameter(torch.ones(4))}, {}, None)
    weights.grads.add("p", torch.ones(4))
    total = weights.grads.sums["p"]
    before = total._version
    weights.scale_gradients(clip_factor(torch.tensor(2.0), 3.0))
    assert total._version == before
    weights.scale_gradients(clip_factor(torch.tensor(2.0), 1.0))
    assert total._version > before


class Products(TorchDispatchMode):
    """The dtypes that products are computed in, by device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor:
            self.seen.append((args[0].device.type, torch.result_type(*args)))
        return func(*args, **(kwargs or {}))


def test_accelerators_scale_narrow_gradients_in_float32() -> None:
    """A number there took the gradients' dtype before it multiplied. The meta device stands for them."""
    for shape in ((5, 3), ()):
        param = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device="meta"))
        weights = Weights({"p": param}, {}, lambda own: torch.optim.SGD(own, lr=0.1))
        weights.grads.add("p", torch.zeros_like(param))
        with Products() as products:
            weights.scale_gradients(torch.zeros((), device="meta"))
        assert products.seen == [("meta", torch.float32)]
