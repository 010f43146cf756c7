"""A step that was broken off left gradients, offloaded residuals and bytes in the ledger to the next one."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import delayed
import nets
import pytest
import runs
import torch

from pipeloom import Options, Pipeline
from pipeloom.ir.action import RELOAD, STEP, B, F
from pipeloom.ir.errors import CheckpointError, MemoryCapError, OffloadError, PipeloomError
from pipeloom.ir.operation import Operation, declare
from pipeloom.runtime import checkpoint
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.file_tier import FileTier
from pipeloom.runtime.operations import OperationContext
from pipeloom.runtime.rank import Rank, RankWork
from pipeloom.runtime.rehearsal import Rehearsal

JOB = nets.job("skips")


@contextmanager
def interrupted(pipeline: Pipeline | Rehearsal, kind: Any, at: int) -> Iterator[None]:
    """Ctrl-C, as in a notebook, in front of the action of a kind that comes after `at` others."""
    verbs, seen = dict(pipeline.worker.verbs), [0]

    def stop(rank: Rank, work: RankWork) -> None:
        seen[0] += 1
        if seen[0] > at:
            raise KeyboardInterrupt
        verbs[kind](rank, work)

    pipeline.worker.verbs[kind] = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        pipeline.worker.verbs = verbs


@contextmanager
def disk_fails(call: str) -> Iterator[None]:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with patch.object(os, call, side_effect=error), pytest.raises(OffloadError, match="Input/output error"):
        yield


@pytest.mark.parametrize("breaks", [RELOAD, B, "pwrite", "preadv"])
def test_the_next_step_starts_from_nothing(breaks: Any, tmp_path: Path) -> None:
    plan = runs.treated_plan(JOB, runs.even_plan(JOB, 1, microbatches=4, schedule="gpipe"), "offload")
    each = sum(residual.bytes for residual in runs.residuals_of(JOB, plan).values())
    with patch("pipeloom.runtime.file_tier.lies_in_memory", return_value=True):
        with pytest.warns(UserWarning, match="tmpfs"):
            pipeline = Pipeline(JOB, plan, options=Options(offload_dir=tmp_path))
    with pipeline:
        tier = pipeline.tier
        assert isinstance(tier, FileTier)
        pipeline.step(JOB.batch(0, 8))
        levels = dict(pipeline.ledger.levels)
        for _ in range(2):
            with interrupted(pipeline, breaks, 0) if breaks in (RELOAD, B) else disk_fails(breaks):
                pipeline.step(JOB.batch(1, 8))
            pipeline.step(JOB.batch(2, 8))
            assert pipeline.ledger.levels == levels and pipeline.ledger.host == tier.used_bytes == 0
        assert tier._end == 0, "some of the file is still taken"
        assert pipeline.ledger.peak == sum(pipeline.ledger.at_peak.values())
        # However slow copies are, there are never more than a step's and those of the one broken off before.
        assert pipeline.ledger.host_peak <= 2 * plan.microbatches * each


def trained(broken: Callable[[Pipeline], None] | None) -> tuple[Any, ...]:
    """What two steps leave on one rank, with or without a broken one between them. BatchNorm has buffers."""
    job = nets.job("convnet")
    plan = runs.even_plan(job, 1, microbatches=3, schedule="gpipe")
    with Pipeline(job, plan, options=Options(keep_gradients=True)) as pipeline:
        losses = [pipeline.step(job.batch(0, 6))]
        levels = dict(pipeline.ledger.levels)
        if broken is not None:
            broken(pipeline)
        losses.append(pipeline.step(job.batch(2, 6)))
        assert pipeline.ledger.levels == levels
        return losses, dict(pipeline.weights.newest_state), pipeline.weights.last_gradients


def errs(pipeline: Pipeline) -> None:
    """In a step, which the user catches, and in a rehearsal."""
    time_actions = Rehearsal.time_actions

    def broken_off(rehearsal: Rehearsal, microbatches: int | None) -> None:
        with interrupted(rehearsal, B, 1):
            time_actions(rehearsal)
        stop()

    pipeline.ledger.cap_bytes = pipeline.ledger.total + 1
    with pytest.raises(MemoryCapError):
        pipeline.step(pipeline.job.batch(1, 6))
    pipeline.ledger.cap_bytes = None
    with patch.object(Rehearsal, "time_actions", broken_off), pytest.raises(KeyboardInterrupt):
        pipeline.predict()


def stops(kind: Any, at: int, pipeline: Pipeline) -> None:
    with interrupted(pipeline, kind, at):
        pipeline.step(pipeline.job.batch(1, 6))


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(partial(stops, F, 2), marks=pytest.mark.slow),
        partial(stops, B, 1),
        partial(stops, STEP, 0),
        errs,
    ],
    ids=["forward", "backward", "update", "errors"],
)
def test_nothing_of_it_is_in_the_next_gradients(broken: Callable[[Pipeline], None]) -> None:
    torch.testing.assert_close(trained(broken), trained(None), rtol=0, atol=0)


def test_what_operations_have_begun_ends_before_the_next_step() -> None:
    done: list[str] = []

    def handler(context: OperationContext) -> Callable[[], None]:
        done.append(f"begin {context.microbatch}")
        return partial(done.append, f"end {context.microbatch}")

    declare(Operation(letters="LATER", meaning="ends at the end of the step", after=F, handler=handler))
    plan = replace(runs.even_plan(JOB, 1, microbatches=2), schedule_rows=("0F0 0LATER0 0B0 0F1 0LATER1 0B1",))
    with Pipeline(JOB, plan) as pipeline:
        with interrupted(pipeline, F, 1):
            pipeline.step(JOB.batch(1, 4))
        assert done == ["begin 0"]
        pipeline.step(JOB.batch(2, 4))
    assert done == ["begin 0", "end 0", "begin 0", "begin 1", "end 0", "end 1"]


def test_a_torn_update_needs_a_checkpoint(tmp_path: Path) -> None:
    def tear() -> None:
        next(iter(pipeline.weights.params.values())).data.zero_()
        raise KeyboardInterrupt

    with Pipeline(JOB, runs.even_plan(JOB, 1, microbatches=2)) as pipeline:
        pipeline.step(JOB.batch(0, 4))
        pipeline.save(tmp_path)
        expected = {n: p.detach().clone() for n, p in pipeline.weights.params.items()}
        with patch.object(pipeline.weights, "step", tear), pytest.raises(KeyboardInterrupt):
            pipeline.step(JOB.batch(1, 4))
        for call in (partial(pipeline.save, tmp_path), *[partial(pipeline.step, JOB.batch(1, 4))] * 2):
            with pytest.raises(PipeloomError, match="update") as caught:
                call()
            assert "checkpoint" in str(caught.value.hint)
            with pytest.raises(CheckpointError):
                pipeline.load(tmp_path / "nowhere")
        pipeline.load(tmp_path)
        for name, param in pipeline.weights.params.items():
            assert torch.equal(param, expected[name])
        pipeline.step(JOB.batch(1, 4))


def test_weights_that_were_loaded_in_part_need_a_checkpoint(tmp_path: Path) -> None:
    with Pipeline(JOB, runs.even_plan(JOB, 1, microbatches=2)) as pipeline:
        pipeline.save(tmp_path)
        whole = pipeline.state_dict()
        for stopped, load, word in (
            ((checkpoint, "_restore_optimizers"), lambda: pipeline.load(tmp_path), "loading a checkpoint"),
            (
                (pipeline.weights, "cast_parameters"),
                lambda: pipeline.load_state_dict(whole),
                "loading weights",
            ),
        ):
            with patch.object(*stopped, stop), pytest.raises(KeyboardInterrupt):
                load()
            with pytest.raises(PipeloomError, match=word):
                pipeline.step(JOB.batch(1, 4))
            pipeline.load(tmp_path)


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("steady", [False, True])
def test_a_checkpoint_that_all_ranks_refuse_breaks_nothing_off(steady: bool, tmp_path: Path) -> None:
    job = delayed.job_of() if steady else JOB
    plan = delayed.steady_plan(job, 2, 2) if steady else runs.even_plan(job, 2, microbatches=2)

    def losses(refused: bool, pipeline: Pipeline) -> list[float]:
        first = pipeline.step(job.batch(0, 4))
        calls = [
            partial(pipeline.load, tmp_path / "nowhere"),
            partial(pipeline.save, tmp_path, extra={"what": object()}),
            partial(pipeline.export, tmp_path),
        ]
        for call in calls if refused else []:
            with pytest.raises(CheckpointError):
                call()
        return [first, pipeline.step(job.batch(1, 4))]

    found, expected = (runs.each_rank(job, plan, partial(losses, refused)) for refused in (True, False))
    assert found == expected


def test_two_ranks_refuse_to_go_on() -> None:
    """Each has stopped somewhere else, so there is no place to start from; and nobody waits for anybody."""
    plan = runs.even_plan(JOB, 2, microbatches=2)

    def rank(index: int, channel: Channel) -> list[str]:
        said, pipeline = [], Pipeline(JOB, plan, channel=channel)
        pipeline.step(JOB.batch(0, 4))
        if index == 0:
            with interrupted(pipeline, B, 1):
                pipeline.step(JOB.batch(1, 4))
        for call in [pipeline.step, pipeline.evaluate] * 2:
            with pytest.raises(PipeloomError) as caught:
                call(JOB.batch(1, 4))
            said.append(str(caught.value).partition("\n")[0])
        with pytest.raises(PipeloomError), pipeline:
            raise caught.value
        return said

    first, second = runs.threads(2, rank, timeout_s=60.0)
    assert all("rank 0 cannot go on: step 2 was broken off" in text for text in first)
    assert second[0].startswith("rank 0 failed: KeyboardInterrupt")
    assert all("rank 1 cannot go on: step 2 was broken off" in text for text in second[1:])
