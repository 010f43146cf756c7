"""Joining a tensor with empty ones only copies nothing that is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import runs
import torch
from batches import normal
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.tracer.captured import Captured


class Joins(nn.Module):
    def __init__(self, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.join = nn.Linear(4, 4), join

    def forward(self, given: Tensor) -> Tensor:
        return self.join(self.layer(given).transpose(0, 1)).square().mean()


def capture_of(join: Callable[[Tensor], Tensor]) -> Captured:
    job = Job(model=lambda: Joins(join), batch=normal(given=(4,)), optimizer=torch.optim.SGD)
    return runs.capture_of(job)


def empty(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, x.shape[1], dtype=dtype)


KEPT = {
    "twice": lambda x: torch.cat([x, x]),
    "as another type": lambda x: torch.cat([empty(x, torch.float64), x]),
    "before its layout is read": lambda x: torch.cat([empty(x), x]).as_strided((4, 2), (2, 1)),
}


def joins(captured: Captured) -> list[str]:
    return [op.name for op in captured.graph.ops if op.target == "aten.cat.default"]


def test_a_new_cache_is_joined_to_nothing() -> None:
    assert not joins(capture_of(lambda x: torch.cat([empty(x), x, empty(x)])))


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_something_stays(name: str) -> None:
    assert len(joins(capture_of(KEPT[name]))) == 1
