"""Collectives outside a step: who is blamed when one fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zoo
from runs import capture_of, even_plan, threads

from pipeloom import Pipeline
from pipeloom.ir.errors import PeerError
from pipeloom.runtime import checkpoint
from pipeloom.runtime.channel import Channel


def test_the_rank_that_went_is_named_and_not_who_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = zoo.job("skips")
    plan, captured = even_plan(job, 2, microbatches=2), capture_of(job)
    saves, prepare = threading.Event(), checkpoint.files.prepare

    def prepared(directory: Path, step: int) -> Path:
        saves.set()
        return prepare(directory, step)

    monkeypatch.setattr(checkpoint.files, "prepare", prepared)

    def rank(index: int, channel: Channel) -> str:
        try:
            with Pipeline(job, plan, channel=channel, captured=captured) as pipeline:
                if index == 0:
                    pipeline.save(tmp_path)
                assert saves.wait(60)
                raise SystemExit("it goes")
        except (SystemExit, PeerError) as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]

    survivor, lost = threads(2, rank, timeout_s=60)
    assert survivor == "PeerError: rank 1 failed: SystemExit: it goes"
    assert lost == "SystemExit: it goes"
    assert not list(tmp_path.glob("step-????????"))
