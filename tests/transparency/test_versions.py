"""Weights that are updated without a flush: the numbers of a one-process loop with a delay of one update.

The loop runs the uncut captured graph, in float64: batch b on version max(b - 1, 0), its update on the
newest.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import runs
import torch
from delayed import OPTIMIZERS, STEPS, Trained, assert_equal, delayed, job_of, steady_plan, trained

from pipeloom import Pipeline, plan
from pipeloom.clusters.names import cpu_cluster
from pipeloom.ir.errors import PipeloomError, ScheduleError
from pipeloom.ir.plan import Plan
from pipeloom.runtime.transports.local_channel import LocalChannel

QUICK = ((2, 1, "momentum"), (3, 2, "adamw"), (3, 3, "sgd"), (4, 12, "adamw"))
DEPTHS = ((2, 1), (2, 2), (3, 2), (3, 3), (4, 12))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stages", "microbatches", "optimizer"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((*depth, optimizer) for depth in DEPTHS for optimizer in OPTIMIZERS)
    ],
)
def test_2bw_is_a_delay_of_one_update(stages: int, microbatches: int, optimizer: str) -> None:
    job = job_of(optimizer)
    found = trained(job, steady_plan(job, stages, microbatches))
    assert_equal(found, delayed(job, microbatches))
    size = sum(t.nbytes for t in found.parameters.values())
    assert found.copied_bytes == STEPS * size, "an update copies the parameters once, a switch nothing"


def test_drains_change_nothing() -> None:
    job = job_of()
    plan = steady_plan(job, 3, 3)
    expected = delayed(job, 3)
    assert_equal(trained(job, plan, drains=(1, 4)), expected)
    assert_equal(trained(job, plan, one_by_one=True), expected)


def test_split_backward() -> None:
    job = job_of()
    assert_equal(trained(job, steady_plan(job, 3, 3, split=True)), delayed(job, 3))


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_ties_and_clipping(clip_norm: float | None) -> None:
    job = job_of(tied=True)
    found = trained(job, steady_plan(job, 3, 3), clip_norm=clip_norm)
    expected = delayed(job, 3, clip_norm=clip_norm)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "schedule", ["zb_v", *(pytest.param(n, marks=pytest.mark.slow) for n in ("interleaved_1f1b", "dualpipe"))]
)
def test_other_schedules(schedule: str) -> None:
    """Stages in a loop, in a wave, and replicas in both directions."""
    job = job_of(tied=True)
    captured = runs.capture_of(job, 2)
    made = plan(
        job,
        ranks=2,
        schedule=schedule,
        microbatches=8,
        microbatch_size=2,
        weights="2bw",
        cluster=cpu_cluster(2),
        captured=captured,
    )
    found, expected = trained(job, made), delayed(job, 8)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], tensor, rtol=1e-9, atol=1e-12)


def test_too_few_micro_batches_are_refused_with_the_number_that_suffices() -> None:
    with pytest.raises(ScheduleError, match="update every 3 micro-batches"):
        steady_plan(job_of(), 4, 2)


def test_a_checkpoint_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Saved after three batches, loaded by a pipeline of another depth: the same numbers."""
    job = job_of()
    expected = trained(job, steady_plan(job, 3, 4))

    def half(plan: Plan, low: int, high: int) -> list[Trained]:
        def work(rank: int, channel: LocalChannel) -> Trained:
            with Pipeline(job, plan, channel=channel) as pipeline:
                if low:
                    pipeline.load(tmp_path)
                batches = [job.batch(index, 8) for index in range(low, high)]
                losses = [report.loss for report in pipeline.steps(batches)]
                pipeline.save(tmp_path)
                parameters = {n: p.detach().clone() for n, p in pipeline.weights.params.items()}
                return Trained(losses, [], parameters)

        with runs.shared_captures():
            return runs.threads(len(set(plan.placement)), work)

    first = half(steady_plan(job, 1, 4), 0, 3)
    second = half(steady_plan(job, 1, 4), 3, STEPS)
    assert first[0].losses + second[0].losses == expected.losses
    for name, tensor in expected.parameters.items():
        assert torch.equal(second[0].parameters[name], tensor), name


def test_after_a_step_that_was_broken_off_a_checkpoint_goes_on(tmp_path: Path) -> None:
    """On one rank: what was in flight is forgotten, and nothing but loading is allowed."""
    job = job_of()
    batches = [job.batch(index, 8) for index in range(STEPS)]
    with runs.shared_captures(), Pipeline(job, steady_plan(job, 1, 4)) as pipeline:
        losses = [report.loss for report in pipeline.steps(batches[:3])]
        pipeline.save(tmp_path)
        list(pipeline.steps(batches[:1]))
        with (
            patch.object(pipeline.worker, "run", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            list(pipeline.steps(batches[:2]))
        with pytest.raises(PipeloomError, match="load the newest checkpoint"):
            pipeline.step(batches[3])
        pipeline.load(tmp_path)
        losses += [report.loss for report in pipeline.steps(batches[3:])]
    assert losses == delayed(job, 4).losses
