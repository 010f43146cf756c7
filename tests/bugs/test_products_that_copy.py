"""Products copy operands that do not lie in one piece, and autograd keeps the copies. Plans counted what was
copied instead: stages kept up to 30 % more, and what a plan named to be recomputed was not there."""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

import pytest
import torch
import zoo
from cut_memory import stage_bytes
from cuts import ROWS, assert_same_at_every_cut, places, split_at
from runs import assert_same, capture_of, pipelined, plain, plan_for
from torch import Tensor, nn

from pipeloom import Job, plan as make_plan
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.plan import Plan
from pipeloom.ir.stages import cut
from pipeloom.tracer.export.evaluation import capture_evaluation, cut_evaluation

WIDTH, LENGTH, HEADS = 16, 12, 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.along, self.plain = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH, bias=False)

    def heads(self, x: Tensor) -> list[Tensor]:
        rows, length, _ = x.shape
        return [p.view(rows, length, HEADS, -1).transpose(1, 2) for p in self.into(x).split(WIDTH, 2)]

    def join(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.out(x.transpose(1, 2).flatten(2)))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mix(torch.tanh(x))).square().mean()


class Attention(Base):
    """As it is written where there is no fused one."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.join((q @ k.transpose(-2, -1)).softmax(-1) @ v)


class Shared(Base):
    """One head of keys and values for all: they are expanded."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.join((q @ k[:, :1].mT).softmax(-1) @ v[:, :1])


class Einsum(Base):
    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(2, (HEADS, -1)) for p in self.into(x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return cast(Tensor, self.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2)))


class Mixer(Base):
    """Linear layers along the other dimension, one with a bias and one without; a matrix from the left."""

    def mix(self, x: Tensor) -> Tensor:
        turned = self.plain(torch.tanh(self.along(self.into(x).transpose(1, 2))))
        return cast(Tensor, self.out((self.plain.weight @ turned.transpose(1, 2))[..., :WIDTH]))


class Encoder(Base):
    """PyTorch's own: its attention turns what it gets."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, self.dropout, batch_first=True)

    def mix(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.into(x)[..., :WIDTH]))  # type: ignore[no-any-return]


class Dropping(Encoder):
    """On the CPU its attention runs as separate products, which do not have to copy the values."""

    dropout = 0.1


def batch(seed: int, rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))}


def job_of(model: type[Base]) -> Job:
    return Job(model=model, batch=batch, optimizer=zoo.sgd, name=model.__name__)


JOBS = [job_of(model) for model in (Attention, Shared, Einsum, Mixer, Encoder)]


def quickly(*names: str) -> list[Any]:
    """All jobs; those that are not named are for the slow tests."""
    return [job if job.name in names else pytest.param(job, marks=pytest.mark.slow) for job in JOBS]


STAGES_OF = [*quickly("Shared"), pytest.param(job_of(Dropping), marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("job", STAGES_OF, ids=lambda job: job.name)
def test_stages_keep_what_the_plan_says(job: Job, step: int) -> None:
    captured = capture_of(job, ROWS)
    names = places(captured)
    for place in range(1, len(names), step):
        for stage in stage_bytes(captured, cut(captured.graph, split_at(captured, place))):
            assert stage.own.residuals == stage.planned.residuals, (names[place], stage)
            assert stage.own.inputs <= stage.planned.inputs, (names[place], stage)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_numbers_are_those_of_one_process_wherever_it_is_cut(job: Job) -> None:
    batches = [batch(seed, 2 * ROWS) for seed in range(2)]
    assert_same_at_every_cut(job, batches, tolerance=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_in_one_stage_not_a_bit_differs(job: Job) -> None:
    plan = plan_for(capture_of(job, ROWS), split_at(capture_of(job, ROWS)), microbatches=2)
    batches = [batch(seed, 2 * ROWS) for seed in range(2)]
    assert_same(pipelined(job, plan, batches), plain(job, batches, 2), tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("job", quickly("Shared"), ids=lambda job: job.name)
def test_plans_that_recompute_keep_their_cap(job: Job) -> None:
    rows, count = 16, 4

    def planned(memory: int) -> Plan:
        return make_plan(
            job,
            ranks=2,
            microbatches=count,
            microbatch_size=rows,
            memory=memory,
            cluster=cpu_cluster(2),
            planner="dawnpiper",
            treatments=["recompute"],
            captured=capture_of(job, rows),
        )

    most = max(planned(1 << 30).peaks)
    plans = (planned(round(share * most)) for share in (0.9, 0.8, 0.7, 0.6, 0.55))
    tight = next(plan for plan in plans if any(stage.recomputed_bytes for stage in plan.stages))
    batches = [batch(seed, rows * count) for seed in range(2)]
    assert_same(pipelined(job, tight, batches), plain(job, batches, count), tolerance=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_evaluation_is_cut_where_training_was(job: Job) -> None:
    """Products were taken apart in training only, where their matrices learn: stages had nothing to do."""
    trained = capture_of(job, ROWS)
    evaluated = capture_evaluation(job, trained, batch(0, ROWS))
    for cuts in combinations(range(1, len(places(trained))), 2):
        cut_evaluation(evaluated.graph, trained.graph, cut(trained.graph, split_at(trained, *cuts)))
