"""Rehearsing with the worker itself, before training and between steps, must leave no trace."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import nets
import pytest
import runs
import torch
from delayed import job_of, steady_plan
from every_schedule import gpt_job, plan_of
from odd.case import job as odd_job
from odd.control_flow import LeavesOutByPython
from optimizers import BOTH, halving, job_of as trained_by

from pipeloom import Job, Pipeline
from pipeloom.ir.action import RECOMPUTE, W
from pipeloom.ir.cluster import Link
from pipeloom.ir.operation import Operation, declare
from pipeloom.ir.plan import Plan
from pipeloom.runtime.calibrate import busy_link, measure_link, time_sums
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.messages import Message
from pipeloom.runtime.operations import OperationContext
from pipeloom.schedules.language.patterns import phases
from pipeloom.schedules.language.recipe import Recipe
from pipeloom.schedules.registry import Entry, shape_of

pytestmark = pytest.mark.usefixtures("quick_rehearsals")


@pytest.mark.sampled("split", "recompute")
@pytest.mark.parametrize("how", ["whole", "split", "recompute"])
def test_every_action_is_timed_and_nothing_is_left(how: str) -> None:
    """The convolution network has BatchNorm, whose buffers a forward changes."""
    job = nets.job("convnet")
    plan = runs.even_plan(job, 2, schedule="1f1b", microbatches=2, split=how == "split")
    if how == "recompute":
        plan = runs.treated_plan(job, plan, "recompute", ahead=(1,))

    def rank(pipeline: Pipeline) -> None:
        weights = pipeline.weights
        before = {key: tensor.clone() for key, tensor in weights.newest_state.items()}
        walk = pipeline.forecast().rehearsal().time_actions()
        ahead = {"1RECOMPUTE0", "1RECOMPUTE1"} if how == "recompute" and pipeline.rank == 1 else set()
        assert {str(action) for action in walk if action.kind == RECOMPUTE} == ahead
        assert {a for a in walk if a.kind != RECOMPUTE} == set(plan.as_schedule.rows[pipeline.rank])
        assert min(walk.values()) > 0 and not weights.grads.touched
        torch.testing.assert_close(dict(weights.newest_state), before, rtol=0, atol=0)

    runs.each_rank(job, plan, rank)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def training(job: Job, plan: Plan, *, rehearses: bool, **options: Any) -> list[tuple[Any, ...]]:
    """Everything that three steps leave on each of two ranks."""

    def rank(pipeline: Pipeline) -> tuple[Any, ...]:
        losses = []
        for number in range(3):
            if rehearses:
                predicted = pipeline.predict()
                assert predicted.source == "predicted" and predicted.step_s > 0
                updates = [event.duration_s for event in predicted.events if "STEP" in event.action]
                assert sum(updates) > 0, "also where the optimizer has made its state"
            losses.append(pipeline.step(job.batch(number, plan.microbatches * plan.microbatch_size)))
        if rehearses:
            pipeline.predict()
        optimizer = pipeline.weights.optimizer
        return (
            losses,
            dict(pipeline.weights.newest_state),
            pipeline.weights.last_gradients,
            copy.deepcopy(optimizer.state_dict()) if optimizer else None,
            pipeline.ledger.peak,
            pipeline.ledger.at_peak,
            pipeline.report.peak_bytes if plan.weights == "flush" else None,
        )

    return runs.each_rank(job, plan, rank, clip_norm=0.5, keep_gradients=True, **options)


def require_same(job: Job, plan: Plan, **options: Any) -> None:
    generator = torch.get_rng_state()
    plain = training(job, plan, rehearses=False, **options)
    rehearsed = training(job, plan, rehearses=True, **options)
    for one, other in zip(plain, rehearsed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.sampled("dualpipe")
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", "gpipe", "zb_h1", "zb_v", "chimera"])
def test_training_is_the_same_with_rehearsals(schedule: str) -> None:
    job = replace(gpt_job(), optimizer=adam)
    require_same(job, plan_of(job, schedule, 2, microbatches=4))


@pytest.mark.sampled("stash")
@pytest.mark.parametrize("policy", ["2bw", "stash"])
def test_training_without_a_flush_is_the_same_with_rehearsals(policy: str) -> None:
    """A rehearsal uses the sums of gradients and the versions of the weights: nothing of it may stay."""
    job = job_of("adamw")
    require_same(job, steady_plan(job, 2, 2, policy))


def test_two_optimizers_in_one_are_left_as_they_are() -> None:
    job = trained_by(BOTH)
    require_same(job, runs.even_plan(job, 2, microbatches=2), scheduler=halving)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_buffers_and_random_numbers_are_the_same_with_rehearsals(split: bool) -> None:
    job = replace(nets.job("convnet"), optimizer=adam)
    require_same(job, runs.even_plan(job, 2, microbatches=2, split=split))
    dropout = replace(nets.with_dropout("gpt2"), optimizer=adam)
    require_same(dropout, runs.even_plan(dropout, 2, microbatches=2, split=split))


def test_a_handler_that_remembers_is_rehearsed_with_a_memory_of_its_own() -> None:
    """It delays every second gradient by a step; a rehearsal in between must not get in its way."""
    calls: list[int] = []

    def delay(context: OperationContext) -> None:
        calls.append(context.rank)
        for name, gradient in context.gradients.items() if context.last else ():
            earlier = context.state.get(name, torch.zeros(()))
            context.state[name] = gradient / 2
            gradient.sub_(context.state[name]).add_(earlier)

    operation = declare(Operation(letters="DELAY", meaning="delay", after=W, handler=delay))

    def recipe(s: Any) -> Recipe:
        rows = phases(s, warm_up=lambda rank: s.ranks - 1 - rank, repeat="FI")
        return Recipe(kinds="FIW", rows=rows, memory=s.ranks, insert=(operation,))

    job = replace(nets.job("gpt"), optimizer=adam)
    plan = runs.even_plan(job, 2, microbatches=3, split=True)
    stages = plan.stage_graph(runs.capture_of(job).graph)
    rows, _, pairs = Entry(recipe=recipe).make(replace(shape_of(2, microbatches=3), stages=stages))
    made = replace(plan.as_schedule, rows=tuple(map(tuple, rows)), pairs=pairs)
    require_same(job, replace(plan, schedule_rows=tuple(str(made).splitlines())))
    assert len(calls) > 2 * 2 * 3 * 3


def test_a_message_that_stalls_now_and_then_costs_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Echoes count at their quickest; a step has all of them."""

    def rank(_: int, channel: Channel) -> tuple[Link, Link]:
        clock = SimpleNamespace(now_s=0.0, mark=lambda: clock.now_s, seconds=lambda start, end: end - start)
        send, numbers = channel.send, count()

        def stalling(message: Message, tensors: Sequence[torch.Tensor]) -> None:
            clock.now_s += 8.0 if next(numbers) % 4 == 0 else 0.0
            send(message, tensors)

        channel.send = stalling
        where = channel, 8, clock, torch.device("cpu")
        return measure_link(*where), busy_link(*where, action_s=1e-4)

    monkeypatch.setattr("pipeloom.runtime.calibrate.ECHOES", 25)
    for idle, busy in runs.threads(2, rank):
        assert idle.overhead_s == 0
        assert busy.overhead_s == pytest.approx(8.0 / 4)


def test_the_sums_of_replicas_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.forecast.time_sums", lambda *given: 1000.0 + time_sums(*given))
    job = replace(gpt_job(), optimizer=adam)

    def rank(pipeline: Pipeline) -> float:
        mine = [e for e in pipeline.predict().events if e.rank == pipeline.rank]
        return sum(e.duration_s for e in mine if "STEP" in e.action)

    assert sum(runs.each_rank(job, plan_of(job, "chimera", 2, microbatches=2), rank)) > 900.0


def test_a_model_that_leaves_out_layers_by_pythons_generator_is_rehearsed() -> None:
    job = odd_job(LeavesOutByPython)

    def rank(pipeline: Pipeline) -> None:
        assert min(pipeline.forecast().rehearsal().time_actions().values()) > 0

    runs.each_rank(job, runs.even_plan(job, 2, microbatches=8), rank)
