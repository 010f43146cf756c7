"""Numbers that the forward or the loss reads from tensors (`.item()`) ended in a traceback of torch's, and
what torch.export refuses did not say where it stands."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch.nn.functional as F
from odd_code import Stack
from odd_models import Block, job
from runs import assert_same, capture_of, even_plan, pipelined, plain
from torch import Tensor


class Plain(Stack):
    block = Block


class OutputsOnly(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.run(self.inlet(x)))


def scaled_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(outputs, batch["y"])
    return loss * (1 + loss.item())  # in the loss


class Scaled(Plain):
    def run(self, h: Tensor) -> Tensor:
        scale = h.abs().mean().item()  # in the forward
        return super().run(h) * scale


class Positions(Plain):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h) + (h > 0).nonzero().sum()  # sizes that nothing is decided on


class Decides(Plain):
    def run(self, h: Tensor) -> Tensor:
        return super().run(h) if h.sum() > 0 else h  # a decision


CASES = {
    "in the loss": job(OutputsOnly, loss=scaled_loss),
    "in the forward": job(Scaled),
    "sizes that nothing is decided on": job(Positions),
    "a decision": job(Decides),
}


def line_of(mark: str) -> int:
    return 1 + next(n for n, line in enumerate(open(__file__).readlines()) if line.endswith(f"# {mark}\n"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_they_are_cut_between_modules_and_the_line_is_named(case: str) -> None:
    job = CASES[case]
    fallback = capture_of(job).graph.fallback
    assert f"test_numbers_read_from_data.py:{line_of(case)})" in fallback, fallback
    batches = [job.batch(seed, 8) for seed in range(2)]
    found = pipelined(job, even_plan(job, 2, microbatches=4), batches, evaluate=batches[:1])
    assert_same(found, plain(job, batches, 4, evaluate=batches[:1]), tolerance=1e-5)


def test_a_number_that_is_only_looked_at_is_no_obstacle() -> None:
    class Looks(Plain):
        def run(self, h: Tensor) -> Tensor:
            h.detach().sum().item()
            return super().run(h)

    assert not capture_of(job(Looks)).graph.fallback
