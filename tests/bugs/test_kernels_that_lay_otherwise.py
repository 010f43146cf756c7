"""Some kernels lay what they make otherwise than the fake ones that stages are traced with. What is a view in
the trace then takes a copy: steps ended with "view size is not compatible with input tensor's size"."""

import pytest
import torch
import zoo
from cuts import assert_same_at_every_cut
from torch import Tensor, nn

from pipeloom import Job


class Series(nn.Module):
    """Features of a series are normalised as channels, as in many models of sound and time."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.into(x).transpose(1, 2)).transpose(1, 2)
        return self.out(nn.functional.logsigmoid(h.transpose(1, 2)).transpose(1, 2)).square().mean()


class Rolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(1, 4, 1), nn.Linear(80, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x[:, None]).roll(1, 2).flatten(1)).square().mean()


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 5, 4, generator=torch.Generator().manual_seed(seed)).double()}


@pytest.mark.slow
@pytest.mark.parametrize("model", [Series, Rolled])
def test_numbers_are_those_of_one_process_wherever_it_is_cut(model: type[nn.Module]) -> None:
    job = Job(model=lambda: model().double(), batch=batch, optimizer=zoo.sgd, name="layouts")
    assert_same_at_every_cut(job, [batch(seed, 4) for seed in range(2)], tolerance=1e-9)
