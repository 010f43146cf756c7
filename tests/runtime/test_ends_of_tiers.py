"""Where residuals go must be given back however a pipeline ends, and must not hide why it ended."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
import zoo

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import InfeasibleError
from pipeloom.ir.plan import Plan
from pipeloom.runtime import pinned_tier
from pipeloom.runtime.board import Failure
from pipeloom.runtime.file_tier import FileTier
from pipeloom.runtime.pinned_tier import PinnedTier

JOB = zoo.job("skips")


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


def test_what_fails_behind_the_tier_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise ValueError("no worker")

    monkeypatch.setattr("pipeloom.pipeline.Rank", fails)
    plan, folder = offloading(), tmp_path / "away"
    with nothing_left(folder), pytest.raises(ValueError, match="no worker"):
        Pipeline(JOB, plan, options=Options(offload_dir=folder))


def test_a_tier_that_cannot_be_closed_leaves_the_other_ranks_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


class LateError:
    """A file whose last write fails when it is closed, as network disks say it."""

    def __init__(self, tier: FileTier) -> None:
        self._file, tier._file = tier._file, self  # type: ignore[assignment]

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("mistake", [False, True])
def test_a_file_that_cannot_be_closed_neither_ends_a_good_run_nor_hides_an_error(
    tmp_path: Path, mistake: bool
) -> None:
    error = pytest.raises(ValueError, match="the user's own mistake") if mistake else nullcontext()
    with pytest.warns(UserWarning, match="rank 0: .* did not close .*: Input.output error; nothing"):
        with error, Pipeline(JOB, offloading(), options=Options(offload_dir=tmp_path)) as pipeline:
            assert isinstance(pipeline.tier, FileTier)
            LateError(pipeline.tier)
            pipeline.step(JOB.batch(0, 4))
            if mistake:
                raise ValueError("the user's own mistake")


def test_a_broken_device_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "Stream", Broken)
    tier = PinnedTier(0)
    tier._reloading.add(pinned_tier.PinnedCopy(tier, ()))
    tier._idle_chunks.append(torch.empty(1))
    tier.close()
    assert not tier._reloading and not tier._idle_chunks
