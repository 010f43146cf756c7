"""Values arrived as their dimensions are numbered, not as they lay. Ops then saved what came in a message,
whose buffer stayed until the backward: a rank needed more than its plan said (T5, cut inside attention)."""

import pytest
import torch
import zoo
from cut_memory import stage_bytes
from runs import assert_same, capture_of, pipelined, plain, plan_for
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.stages import cut
from pipeloom.tracer.captured import Captured

ROWS = 2


class Turned(nn.Module):
    """Heads that are transposed, cut apart and expanded in front of reshapes that have to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.into(x).view(rows, length, 3, 2, 4).unbind(2)
        gates = (q.transpose(1, 2) * k.transpose(1, 2)).softmax(-1)
        heads = v.transpose(1, 2).reshape(2 * rows, length, 4) * gates.reshape(2 * rows, length, 4)
        mixed = heads.view(rows, 2, length, 4).transpose(1, 2).reshape(rows, length, 8)
        shared = mixed[:, :, None, :4].expand(rows, length, 2, 4).reshape(rows, length, 8)
        wide = self.scale * (mixed + shared)[:, 1:].reshape(-1, 8)
        return self.out(wide).view(rows, -1, 8).transpose(0, 1).tanh().square().mean()


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(seed))}


TURNED = Job(model=Turned, batch=batch, optimizer=zoo.sgd, name="turned")


def places(captured: Captured) -> list[str]:
    return [op.name for op in captured.graph.ops if not op.cheap]


def split_at(captured: Captured, *cuts: int) -> dict[str, int]:
    return {name: sum(at >= place for place in cuts) for at, name in enumerate(places(captured))}


@pytest.mark.parametrize(
    ("job", "step"), [(TURNED, 1), pytest.param(zoo.job("t5"), 5, marks=pytest.mark.slow)]
)
def test_at_every_cut_stages_keep_what_the_plan_says(job: Job, step: int) -> None:
    captured = capture_of(job, ROWS)
    names = places(captured)
    for place in range(1, len(names), step):
        for stage in stage_bytes(captured, cut(captured.graph, split_at(captured, place))):
            assert stage.own.inputs <= stage.planned.inputs, (names[place], stage)
            assert stage.own.residuals == stage.planned.residuals, (names[place], stage)


def test_numbers_are_those_of_one_process_wherever_it_is_cut() -> None:
    captured = capture_of(TURNED, ROWS)
    batches = [batch(seed, 2 * ROWS) for seed in range(2)]
    expected = plain(TURNED, batches, 2)
    for place in range(1, len(places(captured)) - 1):
        plan = plan_for(captured, split_at(captured, place, place + 1), microbatches=2)
        assert_same(pipelined(TURNED, plan, batches), expected, tolerance=1e-5)


def test_a_product_with_a_weight_needs_room_for_what_is_summed_into_its_gradient() -> None:
    """1.4 % more than the cap, in the backward of T5's norm: the product is as large as the values."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.into = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.scale * self.into(x)).square().mean()

    captured = capture_of(Job(model=Scaled, batch=batch, name="scaled"), ROWS)
    stage, _ = stage_bytes(captured, cut(captured.graph, split_at(captured, 2)))
    assert stage.own.backward <= stage.planned.backward <= stage.own.backward + 8 * 4
