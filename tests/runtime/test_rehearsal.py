"""Timing a rank's actions with the worker itself must leave no trace in its weights."""

from __future__ import annotations

import pytest
import runs
import torch
import zoo

from pipeloom import Pipeline
from pipeloom.api.forecast import Forecast
from pipeloom.runtime.local_channel import LocalChannel
from pipeloom.runtime.rehearsal import drawn, time_actions


def rehearse(name: str, *, schedule: str, split: bool) -> list[set[tuple[int, str]]]:
    """What each rank of two timed."""
    job = zoo.job(name)
    plan = runs.even_plan(job, 2, schedule=schedule, microbatches=2, split=split)

    def rank(index: int, channel: LocalChannel) -> set[tuple[int, str]]:
        with Pipeline(job, plan, channel=channel) as pipeline:
            return timed(pipeline)

    with runs.shared_captures():
        return runs.threads(2, rank)


def timed(pipeline: Pipeline) -> set[tuple[int, str]]:
    """(stage, kind) of what was timed; checks that weights and gradients are as before."""
    weights = pipeline.weights
    before = {key: tensor.clone() for key, tensor in weights.state(0).items()}
    forecast: Forecast = pipeline._forecast()
    spans = time_actions(
        forecast.program, forecast.variant, forecast.sample, weights,
        rank=pipeline.rank, clock=forecast.clock, watch=forecast.watch,
    )  # fmt: skip
    assert all(min(took) > 0 for took in spans.values())
    chosen = drawn(forecast.program, spans, seed=0)
    actions = [action for row in forecast.plan.as_schedule.rows for action in row]
    assert set(chosen) == {action for action in actions if (action.stage, action.kind) in spans}
    assert all(took in spans[action.stage, action.kind] for action, took in chosen.items())
    after = weights.state(0)
    assert set(after) == set(before)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not weights.grads.touched
    return set(spans)


@pytest.mark.parametrize(("split", "kinds"), [(False, "FB"), (True, "FIW")])
def test_every_action_is_timed_and_nothing_is_left(split: bool, kinds: str) -> None:
    """The convolution network has BatchNorm, whose buffers a forward changes."""
    found = rehearse("convnet", schedule="1f1b", split=split)
    assert found == [{(stage, kind) for kind in kinds} for stage in range(2)]
