"""Where residuals go must be given back however a pipeline ends, and must not hide why it ended."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nets
import pytest
import runs

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import InfeasibleError, PeerError
from pipeloom.ir.plan import Plan
from pipeloom.runtime.board import Failure
from pipeloom.runtime.channel import Channel
from pipeloom.runtime.file_tier import FileTier
from pipeloom.runtime.rank import Rank

JOB = nets.job("skips")


def offloading() -> Plan:
    return runs.treated_plan(JOB, runs.even_plan(JOB, 1, microbatches=2), "offload")


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [t for t in threading.enumerate() if t not in before and t.is_alive()]
    assert not folder.exists() or not list(folder.iterdir())


def test_a_plan_that_does_not_fit_leaves_no_tier(tmp_path: Path) -> None:
    plan, folder = offloading(), tmp_path / "away"
    with Pipeline(JOB, plan, options=Options(offload_dir=folder)) as pipeline:
        need = sum(pipeline.expected.peaks[0].values())
    plan = replace(plan, caps=(need - 1,))
    with nothing_left(folder), pytest.raises(InfeasibleError):
        Pipeline(JOB, plan, options=Options(offload_dir=folder))


def test_what_fails_behind_the_tier_leaves_none_and_is_told_to_the_other_ranks(tmp_path, monkeypatch) -> None:
    plan = runs.treated_plan(JOB, runs.even_plan(JOB, 2, microbatches=2), "offload")
    folder = tmp_path / "away"

    def no_worker_on_rank_0(*, channel: Channel, **given: Any) -> Rank:
        if channel.rank == 0:
            raise ValueError("no worker")
        return Rank(channel=channel, **given)

    def rank(_: int, channel: Channel) -> str:
        with pytest.raises((ValueError, PeerError)) as caught:
            with Pipeline(JOB, plan, options=Options(offload_dir=folder), channel=channel) as pipeline:
                pipeline.step(JOB.batch(0, 4))
        return str(caught.value)

    monkeypatch.setattr("pipeloom.pipeline.Rank", no_worker_on_rank_0)
    with nothing_left(folder):
        _, told = runs.threads(2, rank, timeout_s=60.0)
    assert told.startswith("rank 0 failed: ValueError: no worker")


def test_a_tier_that_cannot_be_closed_leaves_the_other_ranks_told(tmp_path, monkeypatch) -> None:
    close = FileTier.close

    def broken(tier: FileTier) -> None:
        close(tier)
        raise OSError("the disk is gone")

    monkeypatch.setattr(FileTier, "close", broken)
    pipeline = Pipeline(JOB, offloading(), options=Options(offload_dir=tmp_path))
    left: list[Failure | None] = []
    pipeline.watch.on_exit(lambda: left.append(pipeline.watch._board.failure))
    with pytest.raises(OSError, match="the disk is gone"), pipeline:
        raise ValueError("the user's own mistake")
    assert len(left) == 1 and left[0] is not None and left[0].summary.startswith("ValueError")


@pytest.mark.parametrize("mistake", [False, True])
def test_a_file_that_cannot_be_closed_neither_ends_a_good_run_nor_hides_an_error(tmp_path, mistake) -> None:
    """As where its last write fails, which network disks say then."""
    error = pytest.raises(ValueError, match="the user's own mistake") if mistake else nullcontext()
    late = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.warns(UserWarning, match="rank 0: .* did not close .*: Input.output error; nothing"):
        with error, Pipeline(JOB, offloading(), options=Options(offload_dir=tmp_path)) as pipeline:
            assert isinstance(pipeline.tier, FileTier)
            pipeline.tier._file = Mock(wraps=pipeline.tier._file, **{"close.side_effect": late})
            pipeline.step(JOB.batch(0, 4))
            if mistake:
                raise ValueError("the user's own mistake")
