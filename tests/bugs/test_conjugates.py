"""PyTorch marks conjugates, and imaginary parts of them, instead of making them. Such values could not be
sent, and what reads the mark (`imag`, `view_as_real`) failed in a stage that had received the numbers."""

import pytest
import torch
import zoo
from cuts import assert_same_at_every_cut
from torch import Tensor, nn

from pipeloom import Job


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.into(x).reshape(-1, 2, 2)).t()
        power = (h @ h.conj().t()).imag.sin()
        made = torch.view_as_real(h.mH.resolve_conj()).cos()
        return power.mean() + h.conj().imag.tanh().sum() + made.mean()


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.slow
def test_conjugates_are_sent() -> None:
    job = Job(model=Waves, batch=batch, optimizer=zoo.sgd, name="waves")
    assert_same_at_every_cut(job, [batch(seed, 4) for seed in range(2)], tolerance=1e-5)
