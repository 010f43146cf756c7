"""A forecast made after a step, or after a checkpoint was loaded, said that the optimizer takes no time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import zoo

from pipeloom import Job, Options, Pipeline
from pipeloom.runtime import calibrate
from pipeloom.runtime.recorder import HostClock
from pipeloom.runtime.weights import Weights


class Restless(torch.optim.AdamW):
    """It draws random numbers, keeps something in its groups, and one tensor for all parameters."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["seen"] = group.get("seen", 0) + 1
        done = super().step(closure)
        shared = self.state[group["params"][0]].setdefault("shared", torch.zeros(3))
        for param in group["params"]:
            self.state[param]["shared"] = shared
            param.data.add_(torch.randn(()), alpha=1e-6)
        shared += 1
        return done


@pytest.fixture
def job(quick_rehearsals: None) -> Job:
    return replace(zoo.job("skips"), optimizer=lambda params: Restless(params, lr=1e-2))


def everything(weights: Weights) -> Any:
    assert weights.optimizer is not None
    state = weights.optimizer.state_dict()
    found = (state, weights.newest_state, weights.last_gradients, torch.get_rng_state())
    return copy.deepcopy([{**value} if isinstance(value, dict) else value for value in found])


def test_an_optimizer_with_state_is_timed_and_nothing_changes(job: Job) -> None:
    plan = runs.even_plan(job, 1, microbatches=2)
    with Pipeline(job, plan, options=Options(keep_gradients=True)) as pipeline:
        weights, rows = pipeline.weights, plan.microbatches * plan.microbatch_size
        optimizer = weights.optimizer
        assert optimizer is not None
        for steps in range(2):
            before = everything(weights)
            held = {p: dict(state) for p, state in optimizer.state.items()}
            assert calibrate.time_optimizer(weights, HostClock()) > 0
            torch.testing.assert_close(everything(weights), before, rtol=0, atol=0)
            for param, state in held.items():
                assert all(optimizer.state[param][name] is value for name, value in state.items())
            assert len(optimizer.state) == len(held) == (len(weights.params) if steps else 0)
            pipeline.step(job.batch(steps, rows))


Start = Callable[[Pipeline, Job, Path], None]


def after_a_step(pipeline: Pipeline, job: Job, folder: Path) -> None:
    pipeline.step(job.batch(0, pipeline.plan.microbatches * pipeline.plan.microbatch_size))


def after_loading(pipeline: Pipeline, job: Job, folder: Path) -> None:
    after_a_step(pipeline, job, folder)
    pipeline.save(folder)
    pipeline.load(folder)


@pytest.mark.parametrize("start", [after_a_step, after_loading])
def test_a_late_forecast_has_the_optimizer_in_it(job: Job, start: Start, tmp_path: Path) -> None:
    with Pipeline(job, runs.even_plan(job, 1, microbatches=2)) as pipeline:
        start(pipeline, job, tmp_path)
        steps = [e for e in pipeline.rehearse().events if e.action.endswith("STEP")]
        assert steps and sum(e.duration_s for e in steps) > 0
