"""A rank was killed while a checkpoint was written: a survivor was blamed, with a traceback of gloo's, as the
collectives that write it were called outside the watch."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zoo
from runs import capture_of, even_plan, threads

from pipeloom import Options, Pipeline
from pipeloom.ir.errors import PeerError
from pipeloom.runtime.checkpoint import checkpoint
from pipeloom.runtime.transports.local_channel import LocalChannel

GLOO = "[.../gloo/transport/tcp/pair.cc:539] Connection closed by peer [127.0.0.1]:40000"


def test_the_rank_that_went_is_named_and_not_who_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = zoo.job("skips")
    plan, captured = even_plan(job, 2, microbatches=2), capture_of(job)
    saves, gone = threading.Event(), threading.Event()

    def lose_connection(*_: object, **__: object) -> Path:
        saves.set()
        assert gone.wait(60)
        raise RuntimeError(GLOO)

    monkeypatch.setattr(checkpoint, "save", lose_connection)

    def rank(index: int, channel: LocalChannel) -> str:
        try:
            with Pipeline(job, plan, options=Options(), channel=channel, captured=captured) as pipeline:
                if index == 0:
                    pipeline.save(tmp_path)
                assert saves.wait(60)
                raise SystemExit("it goes")
        except (SystemExit, RuntimeError, PeerError) as error:
            gone.set()
            return f"{type(error).__name__}: {error}".partition("\n")[0]

    survivor, lost = threads(2, rank, timeout_s=60)
    assert survivor == "PeerError: rank 1 failed: SystemExit: it goes"
    assert lost == "SystemExit: it goes"
