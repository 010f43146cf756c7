"""Ops give what the CPU's give, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import standin
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = "standin"

OPS: dict[str, Callable[[Tensor], Any]] = {
    "products": lambda x: x @ x.T + x.sum(),
    "mse_loss": lambda x: [F.mse_loss(x, x * 2, reduction=r) for r in ("mean", "sum", "none")],
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "attention": lambda x: torch.softmax(x @ x.T / 2, -1) @ x,
    "fused attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 4, 3)] * 3, is_causal=True),
    "lists": lambda x: [*torch.split_with_sizes_copy(x, [2, 4], 1), *torch.unbind_copy(x)],
    "views": lambda x: [x.T.contiguous(), x.unfold(1, 2, 1) + 0, x[:, ::2].clone(), x.view(torch.int32) + 0],
    "indices": lambda x: [
        x[x[:, 0].argsort()],
        x.index_add(0, torch.zeros(4, dtype=torch.long, device=x.device), x),
    ],
    "sizes by data": lambda x: [torch.nonzero(x > 0), x[x > 0], torch.unique(x > 0)],
    "sorting": lambda x: [*torch.topk(x, 2), *torch.sort(x)],
    "convolution": lambda x: F.conv1d(x[None], x[:, :, None].expand(4, 6, 3)[:, :4].contiguous()),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2], device=x.device), x),
    "foreach": lambda x: torch._foreach_norm([x, x * 2]),
    "sums so far": lambda x: torch.cumsum(x.flip(0), 0),
    "complex": lambda x: torch.fft.rfft(x).abs(),
    "numbers": lambda x: [x.clamp(0, 1), x.pow(2).mean(), x.std(), torch.addcmul(x, x, x, value=2)],
}


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize("name", OPS)
def test_an_op_equals_the_cpus(name: str) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    expected, found = tensors(OPS[name](x)), tensors(OPS[name](x.to(DEVICE)))
    assert all(t.device.type == DEVICE for t in found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other.cpu()) and one.stride() == other.stride()


def test_results_grow_in_place() -> None:
    x = torch.arange(6.0, device=DEVICE)
    out = torch.empty(0, device=DEVICE)
    torch.add(x, x, out=out)
    assert out.cpu().tolist() == [0, 2, 4, 6, 8, 10]
    torch.nonzero(x > 3, out=(places := torch.empty(0, dtype=torch.long, device=DEVICE)))
    assert places.cpu().tolist() == [[4], [5]]
    x.resize_(8)
    assert x[:6].cpu().tolist() == [0, 1, 2, 3, 4, 5] and x[6:].isnan().all().item()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.norm(self.a(x))))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_the_cpus(optimizer: Any) -> None:
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = Small().to(device)
        steps = optimizer(model.parameters(), lr=0.1)
        for seed in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(device)
            F.cross_entropy(model(x), x.argmax(1) % 3).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
        results.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *results))


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


def test_dropout_draws_what_the_cpu_draws() -> None:
    kept = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(7)
        kept.append(torch.dropout(torch.ones(100, device=device), 0.5, True).cpu())
    host = torch.get_rng_state()
    torch.dropout(torch.ones(100, device=DEVICE), 0.5, True)
    assert torch.equal(*kept) and torch.equal(host, torch.get_rng_state())


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


def test_no_op_here_lacks_its_shapes() -> None:
    assert set(standin.hidden_waits()) <= {"argsort", "_fft_r2c"}, standin.hidden_waits()
