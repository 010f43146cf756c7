"""A forward that puts a new tensor in the place of a buffer was trained with the old one for ever:
torch.export forgets such assignments."""

import pytest
import torch
import zoo
from runs import assert_same, capture_of, even_plan, pipelined, plain
from torch import Tensor, nn

from pipeloom import Job

ROWS, COUNT = 4, 2


class Averaging(nn.Module):
    """Keeps a running mean; in place, or by making a new tensor."""

    def __init__(self, *, in_place: bool, registered: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.in_place = in_place
        if registered:
            self.register_buffer("mean", torch.zeros(4))
        else:
            self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.in_place:
            self.mean += y.detach().mean(0)
        else:
            self.mean = 0.5 * self.mean + y.detach().mean(0)
        return (self.second(y) + self.mean.sum()).square().mean()


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("in_place", "registered"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("stages", [1, 2])
def test_losses_are_those_of_one_process(in_place: bool, registered: bool, stages: int) -> None:
    job = Job(
        model=lambda: Averaging(in_place=in_place, registered=registered),
        batch=batch,
        optimizer=zoo.sgd,
        name="averaging",
    )
    captured = capture_of(job, ROWS)
    assert ("a new tensor as mean" in captured.graph.fallback) == (not in_place)
    plan = even_plan(job, stages, microbatches=COUNT, microbatch_size=ROWS)
    batches = [batch(seed, ROWS * COUNT) for seed in range(3)]
    assert_same(pipelined(job, plan, batches), plain(job, batches, COUNT), tolerance=1e-6)
