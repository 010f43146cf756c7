"""Pipelines side by side: replicas of every stage train the micro-batches that one pipeline would."""

from collections import Counter
from dataclasses import replace
from functools import partial

import every_schedule
import nets
import pytest
import runs
import torch
from delayed import assert_equal, job_of, steady_plan, trained
from torch import Tensor, nn

from pipeloom import Job, Pipeline
from pipeloom.ir.plan import Plan, widened
from pipeloom.runtime.channel import Channel, PendingSum
from pipeloom.runtime.transport import GlooTransport, PendingTransfer, SumGroup
from pipeloom.schedules import registry

TOLERANCE = 1e-12
ONE_WAY = [n for n in every_schedule.SYNCHRONOUS if registry.entry(n).place in ("line", "loop", "wave")]

GPT = every_schedule.gpt_job()


@pytest.mark.sampled("zb_v")
@pytest.mark.parametrize("name", ONE_WAY)
def test_schedules_that_flush(name: str) -> None:
    one = replace(every_schedule.plan_of(GPT, name, 2, microbatches=4), weights="flush")
    batches = [GPT.batch(seed, 8) for seed in range(2)]
    found = runs.pipelined(GPT, widened(one, 2), batches, evaluate=batches[:1], clip_norm=0.1)
    expected = runs.plain(GPT, batches, 8, evaluate=batches[:1], clip_norm=0.1)
    assert found.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    runs.assert_same(found, expected, tolerance=TOLERANCE)


def test_a_rank_has_its_own_micro_batches_only() -> None:
    job = job_of()
    plan = widened(runs.even_plan(job, 2, microbatches=2), 2)

    def held(pipeline: Pipeline) -> int:
        pipeline.step(job.batch(0, 8))
        predicted = pipeline.expected.peaks[pipeline.rank]["batch"]
        assert pipeline.ledger.levels["batch"] == predicted
        parts, _ = pipeline.batches.take(job.batch(0, 8), step=1)
        read = {"x"} if pipeline.rank < 2 else set()  # by the first stage
        mine = [read if pipeline.rank % 2 == n // 2 else set() for n in range(4)]
        assert [set(part.inputs) for part in parts] == mine
        return predicted

    whole = job.batch(0, 8)["x"].nbytes
    assert runs.each_rank(job, plan, held) == [whole // 2] * 4


def test_ranks_sum_all_that_they_share_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tied=True)
    begun: list[tuple[tuple[int, ...], int]] = []
    real = Channel.begin_sum

    def counted(self: Channel, tensor: Tensor, group: SumGroup | None, *owner: int) -> PendingSum:
        if self.rank == 0 and group is not None:  # figures of a step go over all ranks
            begun.append((group.ranks, tensor.numel()))
        return real(self, tensor, group, *owner)

    monkeypatch.setattr(Channel, "begin_sum", counted)
    plan = widened(runs.even_plan(job, 2, microbatches=2), 2)
    found = runs.pipelined(job, plan, [job.batch(0, 8)])
    runs.assert_same(found, runs.plain(job, [job.batch(0, 8)], 4), tolerance=TOLERANCE)
    first, last = plan.stage_graph(runs.capture_of(job).graph).params
    size = {name: tensor.numel() for name, tensor in found.parameters.items()}
    own = sum(size[name] for name in first if name not in last)
    assert sorted(begun) == [((0, 1), own), ((0, 1, 2, 3), sum(size[n] for n in first if n in last))]


def test_replicas_that_share_out_the_optimizer_state_change_no_bit_without_clipping() -> None:
    job = job_of("momentum", tied=True)
    one = widened(runs.even_plan(job, 2, microbatches=2), 2)  # sums of three depend on their order
    expected, found = (trained(job, replace(one, shard_optimizer=share)) for share in (False, True))
    assert_equal(found, expected)


@pytest.mark.parametrize(("weights", "width"), [("flush", 2), ("flush", 3), ("2bw", 2)])
def test_gradients_for_owners_take_half_of_the_bytes(weights, width, monkeypatch) -> None:
    """What a rank sends: of a sum for all, a ring's 2 (n - 1) / n of the bytes; of one for an owner, all of
    them, unless it is the owner."""
    sent: Counter[int] = Counter()
    kept: dict[int, set[str]] = {}
    for_all, for_one = GlooTransport.all_reduce, GlooTransport.reduce

    def all_reduce(self: GlooTransport, tensor: Tensor, group: SumGroup | None = None) -> PendingTransfer:
        if group is not None and "gradients" in group.name:
            sent[self.rank] += 2 * (len(group.ranks) - 1) * tensor.nbytes // len(group.ranks)
        return for_all(self, tensor, group)

    def reduce(self: GlooTransport, tensor: Tensor, group: SumGroup, owner: int) -> PendingTransfer:
        sent[self.rank] += 0 if self.rank == owner else tensor.nbytes
        return for_one(self, tensor, group, owner)

    monkeypatch.setattr(GlooTransport, "all_reduce", all_reduce)
    monkeypatch.setattr(GlooTransport, "reduce", reduce)
    job = job_of("momentum")
    one = steady_plan(job, 2, 2) if weights == "2bw" else runs.even_plan(job, 2, microbatches=2)
    plan = widened(one, width)

    def bytes_of_a_step(plan: Plan) -> int:
        def step(pipeline: Pipeline) -> None:
            pipeline.step(job.batch(0, 2 * plan.microbatches))
            kept[pipeline.rank] = set(pipeline.weights.last_gradients)
            if plan.shard_optimizer:
                assert kept[pipeline.rank] == pipeline.weights.stepped

        sent.clear()
        runs.each_rank(job, plan, step, keep_gradients=True)
        return sum(sent.values())

    whole = bytes_of_a_step(plan)
    assert whole and kept[0] == kept[1]
    assert bytes_of_a_step(replace(plan, shard_optimizer=True)) == whole // 2
    assert kept[0] and not kept[0] & kept[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "width"), [("1f1b", 2), ("zb_v", 2), ("dualpipe", 1)])
def test_a_share_of_the_optimizer_state_is_hardly_larger_than_an_even_one(name: str, width: int) -> None:
    one = every_schedule.plan_of(GPT, name, 2, microbatches=4, microbatch_size=2)
    plan = replace(widened(one, width), shard_optimizer=True)

    def held(pipeline: Pipeline) -> None:
        pipeline.step(GPT.batch(0, 2 * plan.microbatches))
        sizes = [p.nbytes for p in pipeline.weights.params.values()]
        own = pipeline.weights.sizes["optimizer"]
        assert 0 < own <= sum(sizes) / 2 + max(sizes)
        assert own == pipeline.expected.peaks[pipeline.rank]["optimizer"]

    runs.each_rank(GPT, plan, held)


class LongOnly(nn.Module):
    """A layer that short inputs pass by, or negative ones."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.decides = decides

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if x.mean().item() > 0 if self.decides else x.shape[1] > 3:
            hidden = hidden + torch.tanh(self.inner(hidden))
        return (self.last(hidden) - y).square().mean()


@pytest.mark.parametrize("decides", [False, True])
def test_the_optimizer_passes_over_what_no_micro_batch_uses(decides: bool) -> None:
    """A gradient of zeros would decay it, and move it by its momentum."""

    def batch(seed: int, rows: int) -> dict[str, Tensor]:
        positive, generator = seed % 2 == 0, torch.Generator().manual_seed(seed)
        x = torch.rand(rows, 5 if positive or decides else 3, 4, generator=generator)
        return {"x": x if positive else -x, "y": x.flip(0)}

    model, adam = partial(LongOnly, decides), partial(torch.optim.AdamW, lr=0.05)
    job = nets.in_double(Job(model=model, batch=batch, optimizer=adam))
    batches = [job.batch(seed, 8) for seed in range(4)]
    found = runs.pipelined(job, widened(runs.even_plan(job, 1, microbatches=2), 2), batches)
    runs.assert_same(found, runs.plain(job, batches, 4), tolerance=TOLERANCE)
