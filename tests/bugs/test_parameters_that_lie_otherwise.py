"""Stages were traced with parameters and buffers that lie as their dimensions are numbered, and run with
them as they are: what was a view in the trace failed, and what channels-last convolutions make was copied
before being sent."""

import torch
import zoo
from cut_memory import stage_bytes
from cuts import ROWS, split_at
from runs import assert_same, capture_of, pipelined, plain, plan_for
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.ir.stages import cut


class Turned(nn.Module):
    """Parameters and a buffer that lie transposed, and reach ops that see them as matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last) * 0.1)
        self.turned = nn.Parameter(torch.randn(2, 5, 4).permute(2, 0, 1) * 0.3)
        self.register_buffer("seen", torch.zeros(5, 2).t())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bchw,ochw->bo", x, self.filters).sin()
        found = torch.einsum("bo,oij->bij", h, self.turned)
        self.seen.mul_(0.9).add_(found.detach().mean(0))
        flat = self.turned.reshape(8, 5) @ self.seen.reshape(-1, 5).t()
        return found.square().mean() + flat.cos().mean()


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).flatten(1).square().mean()


def images(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(seed))}


def test_numbers_are_those_of_one_process() -> None:
    job = Job(model=Turned, batch=images, optimizer=zoo.sgd, name="turned parameters")
    captured = capture_of(job, ROWS)
    batches = [images(seed, 2 * ROWS) for seed in range(3)]
    expected = plain(job, batches, 2)
    for name in ("sin", "einsum_1", "square"):
        place = list(split_at(captured)).index(name)
        plan = plan_for(captured, split_at(captured, place), microbatches=2)
        assert_same(pipelined(job, plan, batches), expected, tolerance=1e-5)


def test_what_channels_last_convolutions_make_is_sent_as_it_is() -> None:
    captured = capture_of(Job(model=ChannelsLast, batch=images, name="channels last"), ROWS)
    made = captured.graph.value["conv2d"]
    assert made.order == (0, 2, 3, 1)
    stage, _ = stage_bytes(captured, cut(captured.graph, split_at(captured, 1)))
    assert stage.ops == ("conv2d",) and stage.own.forward == stage.planned.forward == made.bytes


def test_batches_lie_as_stages_get_them() -> None:
    """Which is without gaps, whatever `Job.batch` returns."""

    def turned(seed: int, rows: int) -> dict[str, Tensor]:
        return {"x": images(seed, rows)["x"].transpose(2, 3).contiguous().transpose(2, 3)}

    captured = capture_of(Job(model=ChannelsLast, batch=turned, name="turned batch"), ROWS)
    assert captured.graph.inputs[0].order == ()
