"""What a training loop may ask for: clipping, schedulers, weights of tokens, odd batches, mixed precision."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nets
import pytest
import torch
from plain_net import two_linears
from refusals import refused
from runs import Numbers, assert_same, each_rank, even_plan, pipelined, plain

from pipeloom import Job, Options, Pipeline, plan
from pipeloom.ir.errors import CheckpointError

GPT, TIED = (nets.job(name, double=True) for name in ("gpt", "tied_thrice"))
LR = torch.optim.lr_scheduler


def compare(job: Job, batches: list[nets.Batch], **options: object) -> Numbers:
    """Pipeline and plain PyTorch with the same options in float64, where what remains is the order of
    additions; returns the pipeline's numbers."""
    plan = even_plan(job, 3, microbatches=2, split=True)
    found = pipelined(job, plan, batches, evaluate=batches[:1], **options)
    expected = plain(job, batches, 2, evaluate=batches[:1], **options)
    assert_same(found, expected, tolerance=1e-12)
    for a, b in zip(found.norms, expected.norms, strict=True):
        assert a is b is None or a == pytest.approx(b, rel=1e-6)
    return found


def steps(job: Job, count: int, rows: int = 4) -> list[nets.Batch]:
    return [job.batch(seed, rows) for seed in range(count)]


HALVES = partial(LR.ExponentialLR, gamma=0.5)


@pytest.mark.sampled("clips", "tied", "rates")
@pytest.mark.parametrize(
    ("job", "rows", "options"),
    [
        (GPT, [4, 4], {"clip_norm": 0.05}),
        (GPT, [4, 4], {"clip_norm": 1e9}),
        (TIED, [4, 4], {"clip_norm": 0.01}),  # a tied parameter counts once
        (GPT, [4, 4, 4, 4], {"scheduler": partial(LR.StepLR, step_size=1, gamma=0.3)}),
        (GPT, [9, 9], {"clip_norm": 0.2, "scheduler": HALVES, "seed": 5}),
    ],
    ids=["clips", "clips nothing", "tied", "rates", "uneven, with a seed"],
)
def test_options(job: Job, rows: list[int], options: dict[str, object]) -> None:
    found = compare(job, [job.batch(seed, count) for seed, count in enumerate(rows)], **options)
    if job is GPT and options.keys() == {"clip_norm"}:
        assert found.norms[0] > 0.05, "the lower limit clips"


def test_losses_weighted_by_tokens() -> None:
    """Micro-batches with few real tokens count less, as if the whole batch were one."""

    def batch(seed: int, size: int) -> nets.Batch:
        made = nets.token_batch(seed, size)
        for row in range(size):
            made["labels"][row, 2 + (seed + 3 * row) % 9 :] = -100
        return made

    job = replace(GPT, batch=batch, weight=nets.shifted_tokens)
    batches = steps(job, 2)
    found = compare(job, batches)
    whole = plain(job, batches, 1)
    assert found.losses == pytest.approx(whole.losses, rel=1e-12)


@pytest.mark.slow
def test_an_uneven_batch_and_other_lengths() -> None:
    """Seven rows for two micro-batches, then longer sequences, then the planned size again."""
    longer = nets.token_batch(2, 4, length=nets.LENGTH + 5)
    compare(GPT, [GPT.batch(0, 4), GPT.batch(1, 7), longer, GPT.batch(3, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("name", nets.DROPOUT)
def test_dropout_is_the_same_for_any_cut(name: str) -> None:
    job = nets.with_dropout(name)
    batches = steps(job, 2, rows=6)
    uncut = pipelined(job, even_plan(job, 1, microbatches=3), batches, evaluate=batches[:1])
    for stages, schedule, split in ((2, "1f1b", True), (4, "gpipe", False)):
        plan = even_plan(job, stages, microbatches=3, schedule=schedule, split=split)
        found = pipelined(job, plan, batches, evaluate=batches[:1])
        assert_same(found, uncut, tolerance=1e-5)
    without = replace(job, model=nets.DROPOUT[name][0])
    again = pipelined(without, even_plan(without, 1, microbatches=3), batches)
    other_seed = pipelined(job, even_plan(job, 1, microbatches=3), batches, seed=1)
    assert again.losses == uncut.losses != other_seed.losses


def test_dropout_differs_between_steps_and_microbatches() -> None:
    job = replace(nets.with_dropout("gpt"), optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    batch = job.batch(0, 2)
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    found = pipelined(job, even_plan(job, 1, microbatches=1), [batch, batch])
    assert found.losses[0] != found.losses[1]
    both = pipelined(job, even_plan(job, 1, microbatches=2), [twice])
    assert both.losses[0] not in found.losses


BFLOAT = {"gpt": 1e-6, "convnet": 1e-6, "frozen": 1e-6, "bert": 1e-6, "gpt2": 1e-6, "llama": 2e-2, "t5": 2e-2}
"""Largest difference of a gradient from eager autocast. Where a weight is used several times, eager adds its
gradients in bfloat16 and we in float32; Llama's grouped heads are summed in another order."""


@pytest.mark.sampled("frozen")
@pytest.mark.parametrize("name", BFLOAT)
def test_bfloat16_autocast_is_that_of_eager(name: str) -> None:
    job = nets.job(name)
    batches = steps(job, 1)
    expected = plain(job, batches, 2, autocast=torch.bfloat16)
    for stages in (1, 3):
        plan = even_plan(job, stages, microbatches=2, autocast=torch.bfloat16, split=stages > 1)
        found = pipelined(job, plan, batches, autocast=torch.bfloat16)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert_same(replace(found, losses=expected.losses), expected, tolerance=BFLOAT[name])
    assert expected.losses != plain(job, batches, 2).losses


def test_the_report_of_a_step_and_a_seed_that_gives_other_weights() -> None:
    plan = even_plan(GPT, 2, microbatches=2)

    def work(pipeline: Pipeline) -> tuple[object, ...]:
        loss, report = pipeline.step(GPT.batch(0, 4)), pipeline.report
        assert report.loss == loss and 0.0 <= report.bubble < 1.0
        assert len(report.busy_s) == len(report.peak_bytes) == 2
        return report.loss, report.grad_norm, report.peak_bytes

    found = [each_rank(GPT, plan, work, clip_norm=1.0, seed=seed) for seed in (0, 1, 0)]
    assert all(first == second for first, second in found)
    assert found[0] == found[2] and found[0][0][0] != found[1][0][0]


def losses(mode: Callable[[], AbstractContextManager[object]], *, compare: bool) -> list[float]:
    job = two_linears()
    made = plan(job, ranks=1, microbatches=2, microbatch_size=2, cluster="1 x cpu")
    with mode(), Pipeline(job, made, options=Options(compare=compare)) as pipeline:
        return [pipeline.step(job.batch(0, 4)) for _ in range(3)] + [pipeline.evaluate(job.batch(0, 4))]


@pytest.mark.sampled(1)
@pytest.mark.own_captures
@pytest.mark.parametrize("compare", [False, True])
def test_a_pipeline_in_no_grad_trains_as_outside(compare, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # compared anew
    assert losses(torch.no_grad, compare=compare) == losses(nullcontext, compare=compare)


def test_a_rank_without_the_first_group_knows_its_rate_after_loading(tmp_path: Path) -> None:
    def last_first(named_parameters: Any) -> torch.optim.Optimizer:
        params = [p for _, p in named_parameters]
        return torch.optim.SGD([{"params": params[-2:]}, {"params": params[:-2]}], lr=0.1)

    job = replace(two_linears(), optimizer=last_first)
    made = plan(job, ranks=2, microbatches=2, microbatch_size=2, cluster="2 x cpu")

    def save(pipeline: Pipeline) -> float:
        pipeline.step(job.batch(0, 4))
        pipeline.save(tmp_path)
        return pipeline.lr

    def load(pipeline: Pipeline) -> float:
        pipeline.load(tmp_path)
        return pipeline.lr

    assert each_rank(job, made, save, scheduler=HALVES) == [0.05, 0.05]
    assert each_rank(job, made, load, scheduler=HALVES) == [0.05, 0.05]


def in_turn(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return LR.SequentialLR(optimizer, [LR.LinearLR(optimizer, 0.5), LR.MultiStepLR(optimizer, [2])], [1])


@pytest.mark.parametrize("scheduler", [partial(LR.MultiStepLR, milestones=[2, 3]), in_turn])
def test_milestones_come_after_a_checkpoint_too(scheduler: Callable[..., object], tmp_path: Path) -> None:
    """Their numbers are keys, which JSON writes as text."""
    job = two_linears()
    plan, rates = even_plan(job, 1, microbatches=2), []
    for load in (False, True):
        with Pipeline(job, plan, options=Options(scheduler=scheduler)) as pipeline:
            if load:
                pipeline.load(tmp_path)
            for step in range(pipeline.steps_done, 5):
                pipeline.step(job.batch(step, 4))
                rates.append(pipeline.lr)
                if step == 0:
                    pipeline.save(tmp_path)
    assert rates[1:5] == rates[5:] and rates[1] > rates[4]


class Two:
    def __init__(self, params: Any) -> None:
        first, *others = params
        self.parts = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]

    def step(self) -> None:
        for part in self.parts:
            part.step()


@pytest.mark.parametrize(
    ("saved", "optimizer", "word"),
    [
        (partial(LR.LambdaLR, lr_lambda=lambda _: 1.0), None, "LambdaLR"),
        (in_turn, None, "SequentialLR"),
        (HALVES, Two, "2"),
    ],
)
def test_another_scheduler_is_refused_before_anything_is_overwritten(
    saved, optimizer, word, tmp_path
) -> None:
    job = two_linears()
    plan = even_plan(job, 1, microbatches=2)
    theirs = replace(job, optimizer=optimizer or job.optimizer)
    with Pipeline(theirs, plan, options=Options(scheduler=saved, compare=False)) as pipeline:
        pipeline.step(job.batch(0, 4))
        pipeline.save(tmp_path)
    with Pipeline(job, plan, options=Options(scheduler=HALVES, compare=False)) as pipeline:
        assert word in refused(CheckpointError, pipeline.load, tmp_path)
        pipeline.step(job.batch(0, 4))
