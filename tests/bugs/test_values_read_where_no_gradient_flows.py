"""A value has a gradient, but its readers in other stages take none of it: no message brings one back, and
the backward of its own stage asked for it (`KeyError`)."""

import pytest
import torch
import zoo
from cuts import ROWS, assert_same_at_every_cut
from torch import Tensor, nn

from pipeloom import Job


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.tanh(self.first(x))
        values = torch.tanh(self.second(keys))
        return values.gather(1, keys.argsort(1)).square().mean()


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.slow
def test_numbers_are_those_of_one_process_wherever_it_is_cut() -> None:
    job = Job(model=Sorted, batch=batch, optimizer=zoo.sgd, name="sorted")
    assert_same_at_every_cut(job, [batch(seed, 2 * ROWS) for seed in range(2)], tolerance=1e-6)
