"""Buffers that the forward changes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import zoo
from runs import assert_same, even_plan, pipelined, plain, plan_for
from torch import Tensor, nn

from pipeloom import Job
from pipeloom.checks.schedules import forwards_in_order
from pipeloom.ir.errors import CutError, ScheduleError
from pipeloom.ir.stages import cut
from pipeloom.schedules import registry
from pipeloom.tracer.capture import capture


class Twice(nn.Module):
    """One BatchNorm used before and after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.norm(self.first(self.norm(x)))) - y).square().mean()


class Copies(nn.Module):
    """Buffers that both take over one value, and are read by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        for name in "ab":
            self.register_buffer(name, torch.zeros(2, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.a.copy_(h.detach())
        self.b.copy_(h.detach())
        return (self.second(h) - y).square().mean()


def job_of(model: Callable[[], nn.Module]) -> Job:
    return Job(model=model, batch=zoo.vector_batch, optimizer=zoo.sgd)


def compare(job: Job, stages: int) -> None:
    batches = [job.batch(seed, 4) for seed in range(2)]
    found = pipelined(job, even_plan(job, stages, microbatches=2), batches, evaluate=batches[:1])
    assert_same(found, plain(job, batches, 2, evaluate=batches[:1]), tolerance=1e-5)


def test_a_norm_used_twice_cannot_be_torn_apart() -> None:
    """The first stage would never have seen the running statistics that the second one made."""
    job = job_of(Twice)
    graph = capture(job, 2).graph
    names = [op.name for op in graph.ops if not op.cheap]
    with pytest.raises(CutError, match="buffer norm.running_mean is updated in every step"):
        cut(graph, {name: index * 3 // len(names) for index, name in enumerate(names)})


@pytest.mark.slow
def test_a_norm_used_twice_in_one_stage() -> None:
    job = job_of(Twice)
    captured = capture(job, 2)
    last = next(op.name for op in captured.graph.ops if "second.weight" in op.params)
    names = [op.name for op in captured.graph.ops if not op.cheap]
    stage_of = {name: int(index >= names.index(last)) for index, name in enumerate(names)}
    batches = [job.batch(seed, 4) for seed in range(2)]
    found = pipelined(job, plan_for(captured, stage_of, microbatches=2), batches, evaluate=batches[:1])
    assert_same(found, plain(job, batches, 2, evaluate=batches[:1]), tolerance=1e-5)


@pytest.mark.parametrize("stages", [1, 2])
def test_buffers_that_are_only_written(stages: int) -> None:
    """Of two buffers set from one value one was not updated, and stage 0 owned a stale copy of each."""
    compare(job_of(Copies), stages)


def test_micro_batches_in_another_order_are_refused_where_a_forward_updates_buffers() -> None:
    """The running mean came out different from that of one process, as each update builds on the last."""
    job = job_of(Twice)
    plan = even_plan(job, 1, microbatches=2, schedule="gpipe")
    swapped = replace(plan, schedule_rows=("0F1 0F0 0B0 0B1",))
    with pytest.raises(ScheduleError, match="rank 0 runs 0F0 after 0F1, but stage 0 updates norm.") as caught:
        pipelined(job, swapped, [job.batch(0, 4)])
    assert caught.value.hint == "run the forwards of stage 0 in the order of their micro-batches"


@pytest.mark.parametrize("name", registry.names())
def test_all_schedules_of_the_library_run_forwards_in_order(name: str) -> None:
    stages, placement = registry.default_placement(name, 4)
    made = registry.build(name, stages, placement, 8)
    forwards_in_order(made, dict.fromkeys(range(made.stages), "buffer"))
